"""Separates a model's reasoning, between two tags at the start of an answer, from the content."""

from dataclasses import dataclass
from typing import Final

from server.parsers.parts import Content, Part, Reasoning
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    start: str
    end: str


REASONING_FORMATS: Final = {
    "think": ReasoningFormat("<think>", "</think>"),  # DeepSeek R1, Qwen 3 and most since
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "harmony": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}


class ReasoningParser:
    """The reasoning of one answer. `is_open` says that the prompt ends with the start tag.

    Whitespace beside a tag belongs to neither reasoning nor content. The result does not depend on how the
    text is split.
    """

    def __init__(self, tags: ReasoningFormat, *, is_open: bool) -> None:
        self._start = tags.start
        self.is_open = is_open
        self._has_begun = is_open  # whether it is known if the answer begins with the tag
        self._is_at_border = is_open
        self._text = ""  # text not returned yet
        self._ends = StopMatcher([StopString(tags.end)])
        self._end = tags.end
        self._num_read = 0
        self.num_chars = 0  # characters of reasoning so far, with its tags

    @property
    def is_over(self) -> bool:
        """Whether only content follows."""
        return self._has_begun and not self.is_open

    def feed(self, text: str) -> list[Part]:
        """Read more text and return the parts that are certain."""
        self._num_read += len(text)
        if not self._has_begun:
            text = self._read_start(text)
        pieces: list[Part] = []
        if self.is_open:
            text = self._read_reasoning(text, pieces) if text else text
            self.num_chars = self._num_read - len(text)
        if self._has_begun and not self.is_open:
            text = self._without_border(text)
            pieces += [Content(text)] if text else []
        return pieces

    def end(self) -> list[Part]:
        """Return the remaining parts, when no text follows."""
        text = self._text
        self._text = ""
        if not text:
            return []
        if self.is_open:
            text = text.rstrip(_SPACE)
            return [Reasoning(text)] if text else []
        return [Content(text)]

    def _read_start(self, text: str) -> str:
        """Check whether the answer begins with the tag. Return the text after it as soon as that is known."""
        self._text += text
        begun = self._text.lstrip(_SPACE)
        if self._start.startswith(begun) and begun != self._start:
            return ""
        self._has_begun = True
        self.is_open = self._is_at_border = begun.startswith(self._start)
        rest = begun[len(self._start) :] if self.is_open else self._text
        self._text = ""
        return rest

    def _read_reasoning(self, text: str, pieces: list[Part]) -> str:
        """Read reasoning up to the end tag and return the text after it.

        Whitespace is held back, because it may precede the tag.
        """
        found = self._ends.feed(text)
        num_read = len(text) if found is None else found[0]
        self._text = self._without_border(self._text + text[:num_read])
        if found is not None:
            certain = self._text[: len(self._text) - len(self._end)].rstrip(_SPACE)
            self._text = ""
            self.is_open = False
            self._is_at_border = True
        else:
            certain = self._text[: len(self._text) - self._ends.num_held].rstrip(_SPACE)
            self._text = self._text[len(certain) :]
        if certain:
            pieces.append(Reasoning(certain))
        return text[num_read:]

    def _without_border(self, text: str) -> str:
        if self._is_at_border:
            text = text.lstrip(_SPACE)
            self._is_at_border = not text
        return text

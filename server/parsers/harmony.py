"""Reads gpt-oss's answers: messages in channels, each a header, `<|message|>` and a body up to an end marker.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The channel `analysis` is reasoning, a message to a tool is a call, and all others are content. Text outside
of messages is content. The result does not depend on how the text is split.
"""

import enum
import re
from collections.abc import Collection
from typing import Final

from server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.parsers.tool_calls import merged
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_BEGINNINGS: Final = ("<|channel|>", "<|start|>", _MESSAGE, "to=")  # of a header
_MAX_HEADER: Final = 512
MARKERS: Final = "\n".join((*_BEGINNINGS, *_ENDS, "<|constrain|>"))


class _State(enum.Enum):
    BETWEEN = enum.auto()  # before a header, or text without one
    HEADER = enum.auto()
    BODY = enum.auto()


class HarmonyParser:
    """The messages of one answer. `names` are those of the tools.

    `num_chars` are the characters up to the end of the reasoning so far. Reasoning after the first content or
    call is not counted.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = _State.BETWEEN
        self._text = ""  # read, and not returned yet
        self._part: type[Content | Reasoning | CallArguments] = Content  # what the body is
        self._has_body = False  # whether a part of the body was returned
        self._markers = _matcher(*_ENDS)
        self._pieces: list[Part] = []
        self._num_read = 0
        self.num_chars = 0
        self.is_over = False  # whether the first content or call has begun

    def feed(self, text: str) -> list[Part]:
        """Read more text and return the parts that are certain."""
        for char in text:
            self._num_read += 1
            self._text += char
            match self._state:
                case _State.BETWEEN:
                    self._read_between()
                case _State.HEADER:
                    self._read_header(char)
                case _State.BODY:
                    self._read_body(char)
        return self._take()

    def end(self) -> list[Part]:
        """Return the remaining parts, when no text follows. An unfinished header is dropped."""
        if self._state is _State.BODY:
            # An unfinished marker is no part of a call's arguments.
            num_held = self._markers.num_held if self._part is CallArguments else 0
            text = self._text[: len(self._text) - num_held]
            self._return_body(text if self._part is Content else text.rstrip(_SPACE))
            self._end_call()
        elif self._state is _State.BETWEEN:
            self._return(Content, self._text)
        self._text = ""
        return self._take()

    def _take(self) -> list[Part]:
        pieces = self._pieces
        self._pieces = []
        return merged(pieces)

    def _read_between(self) -> None:
        begun = self._text.lstrip(_SPACE)
        if any(begun.startswith(marker) for marker in _BEGINNINGS):
            self._state = _State.HEADER
            self._markers = _matcher(_MESSAGE)
            self._markers.feed(begun)
            if begun == _MESSAGE:
                self._begin_body("")
        elif not any(marker.startswith(begun) for marker in _BEGINNINGS):
            # Text without a header is content.
            text = self._text
            self._begin_body("")
            for char in text:
                self._text += char
                self._read_body(char)

    def _read_header(self, char: str) -> None:
        if self._markers.feed(char) is not None:
            self._begin_body(self._text)
        elif len(self._text) > _MAX_HEADER:
            text = self._text
            self._begin_body("")
            self._return(Content, text)

    def _begin_body(self, header: str) -> None:
        self._state = _State.BODY
        self._markers = _matcher(*_ENDS)
        self._text = ""
        self._has_body = False
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if recipient is not None and recipient[1] in self._names:
            self._part = CallArguments
            self._pieces.append(CallStart(recipient[1]))
        elif channel is not None and channel[1] == "analysis":
            self._part = Reasoning
        else:
            self._part = Content
        self.is_over = self.is_over or self._part is not Reasoning

    def _read_body(self, char: str) -> None:
        found = self._markers.feed(char)
        if found is None:
            num_held = self._markers.num_held
            certain = self._text[: len(self._text) - num_held]
            if self._part is not Content:
                certain = certain.rstrip(_SPACE)  # whitespace at the end is no part of it
            self._text = self._text[len(certain) :]
            self._return_body(certain)
        else:
            text = self._text[: -len(found[1])]
            self._return_body(text if self._part is Content else text.rstrip(_SPACE))
            self._end_call()
            self._state = _State.BETWEEN
            self._text = found[1] if found[1] == "<|start|>" else ""
            if self._text:
                self._state = _State.HEADER
                self._markers = _matcher(_MESSAGE)
        if not self.is_over:
            self.num_chars = self._num_read - len(self._text)

    def _return_body(self, text: str) -> None:
        if not self._has_body and self._part is not Content:
            text = text.lstrip(_SPACE)
        self._has_body = self._has_body or bool(text)
        self._return(self._part, text)

    def _return(self, part: type[Content | Reasoning | CallArguments], text: str) -> None:
        if text:
            self._pieces.append(part(text))

    def _end_call(self) -> None:
        if self._part is CallArguments and not self._has_body:
            self._pieces.append(CallArguments("{}"))


def _matcher(*markers: str) -> StopMatcher:
    return StopMatcher([StopString(marker) for marker in markers])

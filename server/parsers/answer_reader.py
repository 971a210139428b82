"""Splits an answer's text into reasoning, content and tool calls."""

from server.parsers.harmony import HarmonyParser
from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.reasoning import ReasoningParser
from server.parsers.tool_calls import ToolCallParser


class AnswerReader:
    """Without parsers, all text is content. Calls after the first `max_calls` are dropped.

    A `HarmonyParser` finds calls too.

    With `only_calls`, content is dropped: it can only be the beginning of an unfinished call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | HarmonyParser | None,
        tools: ToolCallParser | None,
        max_calls: int | None = None,
        *,
        only_calls: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._only_calls = only_calls
        self.num_calls = 0

    @property
    def num_reasoning_chars(self) -> int:
        """The number of characters of reasoning so far, with its tags."""
        return self._reasoning.num_chars if self._reasoning is not None else 0

    @property
    def is_past_reasoning(self) -> bool:
        """Whether no reasoning follows."""
        return self._reasoning is None or self._reasoning.is_over

    def feed(self, text: str) -> list[Part]:
        """Read more text and return the parts that are certain."""
        if not text:
            return []
        return self._calls(self._reasoning.feed(text) if self._reasoning is not None else [Content(text)])

    def end(self) -> list[Part]:
        """Return the remaining parts, when no text follows."""
        rest = self._calls(self._reasoning.end() if self._reasoning is not None else [])
        return [*rest, *self._counted(self._tools.end() if self._tools is not None else [])]

    def _calls(self, pieces: list[Part]) -> list[Part]:
        read: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Content) and self._tools is not None:
                read += self._tools.feed(piece.text)
            else:
                read.append(piece)
        return self._counted(read)

    def _counted(self, pieces: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for piece in pieces:
            self.num_calls += isinstance(piece, CallStart)
            if self._only_calls:
                is_dropped = isinstance(piece, Content)
            else:
                is_beyond = self._max_calls is not None and self.num_calls > self._max_calls
                is_dropped = is_beyond and isinstance(piece, CallStart | CallArguments)
            if not is_dropped:
                kept.append(piece)
        return kept

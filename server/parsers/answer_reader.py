"""One answer's text as reasoning, content and calls, in that order of reading."""

from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.reasoning import ReasoningParser
from server.parsers.tool_calls import ToolCallParser


class AnswerReader:
    """Without parsers, all is content. Calls beyond `max_calls` are left out, and so is the beginning of one where only calls may be."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        max_calls: int | None = None,
        *,
        only_calls: bool = False,
    ) -> None:
        self._reasoning, self._tools, self._max_calls, self._only_calls = (
            reasoning,
            tools,
            max_calls,
            only_calls,
        )
        self.num_calls = 0

    @property
    def num_reasoning_chars(self) -> int:
        """How many characters of the text so far are reasoning, with its tags."""
        return self._reasoning.num_chars if self._reasoning is not None else 0

    @property
    def is_past_reasoning(self) -> bool:
        """Whether no reasoning follows."""
        return self._reasoning is None or self._reasoning.is_over

    def feed(self, text: str) -> list[Part]:
        """Return what is now certain."""
        if not text:
            return []
        return self._calls(self._reasoning.feed(text) if self._reasoning is not None else [Content(text)])

    def end(self) -> list[Part]:
        """Return what is left: no text follows."""
        rest = self._calls(self._reasoning.end() if self._reasoning is not None else [])
        return [*rest, *self._counted(self._tools.end() if self._tools is not None else [])]

    def _calls(self, pieces: list[Part]) -> list[Part]:
        read: list[Part] = []
        for piece in pieces:
            read += (
                self._tools.feed(piece.text)
                if isinstance(piece, Content) and self._tools is not None
                else [piece]
            )
        return self._counted(read)

    def _counted(self, pieces: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for piece in pieces:
            self.num_calls += isinstance(piece, CallStart)
            is_beyond = self._max_calls is not None and self.num_calls > self._max_calls
            if not (
                isinstance(piece, Content)
                if self._only_calls
                else is_beyond and isinstance(piece, CallStart | CallArguments)
            ):
                kept.append(piece)
        return kept

"""Finds the first end of a match of a regular expression in a text that grows.

Matching is that of llguidance: by derivatives, so that a character costs the same for every expression, and
nothing is searched twice. It has no look-around and no anchors but `$`.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_STATES: Final = 30_000


class StopRegexError(ValueError):
    """An expression that is not supported. The message is for the client."""


class StopRegex:
    """The search for one expression in one text.

    Where the automaton grows above a bound, the expression is sought anew: a match across that place is not
    found.
    """

    def __init__(self, pattern: str, start: "LLMatcher") -> None:
        self.pattern = pattern
        self._start = start
        self._matcher = start.deep_copy()

    @classmethod
    def compile(cls, pattern: str) -> "StopRegex":
        """Compile an expression. It takes milliseconds.

        Raises `StopRegexError`, for one that matches the empty text too.
        """
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=50_000,
            max_lexer_states=_MAX_STATES,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        grammar = LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})")
        start = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
        if start.is_error():
            reason = (
                "has look-around or anchors" if "look" in start.get_error() else "is invalid or too large"
            )
            raise StopRegexError(f"{pattern[:64]!r} {reason}")
        if start.is_accepting():
            raise StopRegexError(f"{pattern[:64]!r} matches the empty text")
        return cls(pattern, start)

    def copy(self) -> "StopRegex":
        """Return the search of another text."""
        return StopRegex(self.pattern, self._start)

    def feed(self, text: str) -> int | None:
        """Read further text up to the end of a match; return the number of characters read, or None."""
        for num_read, char in enumerate(text, start=1):
            self._matcher.consume_tokens(list(char.encode()))
            if self._matcher.is_error():
                self._matcher = self._start.deep_copy()
            elif self._matcher.is_accepting():
                return num_read
        return None

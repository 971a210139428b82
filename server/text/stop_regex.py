"""Finds the first end of a match of a regular expression in a text that grows.

Matching is that of llguidance: an automaton that reads each character once, and whose states are made as they
are met. It has no look-around and no anchors. Its size is bounded, because a state of some expressions takes
a thousand times as long to make as to meet again.
"""

import re
from typing import Final

_MAX_STATES: Final = 1000
_FUEL: Final = 200_000  # of the library, to begin
_STEP_FUEL: Final = 10_000  # for each new state
_ANCHOR: Final = re.compile(r"[$^]")
_NO_ANCHORS: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # escaped characters, and classes


class StopRegexError(ValueError):
    """An expression that is not supported. The message is for the client."""


class StopRegex:
    """The search for one expression in one text. It shares no state with others."""

    def __init__(self, pattern: str) -> None:
        """Compile an expression, in about a millisecond.

        Raises `StopRegexError`, for one that matches the empty text too.
        """
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        limits = LLParserLimits(
            initial_lexer_fuel=_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            max_lexer_states=_MAX_STATES,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        tokenizer = LLTokenizer("byte")
        self.pattern = pattern
        # Alone first: a bracket too many must not close the group.
        alone = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern), log_level=0, limits=limits)
        grammar = LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})")
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        errors = [matcher.get_error() for matcher in (alone, self._matcher) if matcher.is_error()]
        if _ANCHOR.search(_NO_ANCHORS.sub("", pattern)) or any("look" in error for error in errors):
            raise StopRegexError(f"{pattern[:64]!r} has look-around or anchors")
        if errors:
            raise StopRegexError(f"{pattern[:64]!r} is invalid or too large")
        if self._matcher.is_accepting():
            raise StopRegexError(f"{pattern[:64]!r} matches the empty text")

    def feed(self, text: str) -> int | None:
        """Read further text up to the end of a match; return the number of characters read, or None.

        Raises `StopRegexError` if the automaton grows too large.
        """
        for num_read, char in enumerate(text, start=1):
            self._matcher.consume_tokens(list(char.encode()))
            if self._matcher.is_error():
                raise StopRegexError(f"{self.pattern[:64]!r} needs too many states: it is too complex")
            if self._matcher.is_accepting():
                return num_read
        return None

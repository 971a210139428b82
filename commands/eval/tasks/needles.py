"""Needles in a haystack: sentences that state a key's value, hidden in other text.

The eight variants are those of RULER (arXiv 2404.06654); the texts are our own.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
from commands.eval.tasks.filler import depths, hide, noise, prose
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import Kind, draw

_PHRASES = ("special magic {kind}", "secret {kind}", "registered {kind}", "private {kind}")
_STATEMENTS = (
    "The {phrase} for {key} is {value}.",
    "Remember that the {phrase} for {key} is {value}.",
    "Note: the {phrase} for {key} is {value}.",
    "As agreed, the {phrase} for {key} is {value}.",
)
_PREAMBLE = (
    "The text below tells a {phrase} here and there. Keep it in mind: a question about it follows.\n\n"
)


class Haystack(StrEnum):
    """The text around the needles."""

    NOISE = "noise"
    PROSE = "prose"
    NEEDLES = "needles"


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """Requests all values of `num_queried` keys out of `num_keys`. A queried key has `num_values` values.

    In a haystack of needles there are as many keys as fit, and the question is about one of them.
    """

    name: str
    haystack: Haystack
    key: Kind = Kind.WORD
    value: Kind = Kind.NUMBER
    num_keys: int = 1
    num_queried: int = 1
    num_values: int = 1

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        wording = _Wording(rng.choice(_PHRASES).format(kind=self.value), rng.choice(_STATEMENTS))
        make = self._among_needles if self.haystack is Haystack.NEEDLES else self._hidden
        return make(rng, wording, num_tokens, count_tokens)

    def _among_needles(
        self, rng: random.Random, wording: "_Wording", num_tokens: int, count_tokens: TokenCounter
    ) -> Case:
        needles = Supply(zip(draw(self.key, rng), draw(self.value, rng), strict=False))
        depth = rng.random()

        def write(size: int) -> Case:
            stated = needles.first(size)
            haystack = " ".join(wording.state(*needle) for needle in stated)
            return self._case(wording, haystack, [stated[int(depth * size)]])

        return fit(write, num_tokens, count_tokens, min_size=1)

    def _hidden(
        self, rng: random.Random, wording: "_Wording", num_tokens: int, count_tokens: TokenCounter
    ) -> Case:
        keys = Supply(draw(self.key, rng)).first(self.num_keys)
        queried_keys = keys[: self.num_queried]
        distractor_keys = keys[self.num_queried :]
        needle_keys = [key for key in queried_keys for _ in range(self.num_values)] + distractor_keys
        rng.shuffle(needle_keys)
        stated = list(zip(needle_keys, draw(self.value, rng), strict=False))
        queried = [needle for key in queried_keys for needle in stated if needle[0] == key]
        positions = depths(rng, len(stated))
        filler = Supply((noise if self.haystack is Haystack.NOISE else prose)(rng))
        statements = [wording.state(*needle) for needle in stated]

        def write(size: int) -> Case:
            return self._case(wording, hide(filler.first(size), statements, positions), queried)

        return fit(write, num_tokens, count_tokens)

    def _case(self, wording: "_Wording", haystack: str, queried: list[tuple[str, str]]) -> Case:
        keys = list(dict.fromkeys(key for key, _ in queried))
        values = tuple(value for _, value in queried)
        if len(keys) > 1:
            question, prefix = wording.ask_many(keys)
            answer = ", ".join(f"{key}: {value}" for key, value in queried)
        else:
            question, prefix = wording.ask(keys[0], len(values))
            answer = ", ".join(values)
        parts = prompt_parts(_PREAMBLE.format(phrase=wording.phrase) + haystack, question, prefix)
        return Case(self.name, *parts, f" {answer}.", values, Scoring.ALL)


@dataclass(frozen=True, slots=True)
class _Wording:
    phrase: str  # the name of a value
    statement: str  # a template with phrase, key and value

    def state(self, key: str, value: str) -> str:
        return self.statement.format(phrase=self.phrase, key=key, value=value)

    def ask(self, key: str, num_values: int) -> tuple[str, str]:
        """Return the question about one key's values, and the first words of its answer."""
        if num_values == 1:
            return (
                f"What is the {self.phrase} for {key} in the text above?",
                f"The {self.phrase} for {key} is",
            )
        return (
            f"What are all the {self.phrase}s for {key} in the text above?",
            f"The {self.phrase}s for {key} are",
        )

    def ask_many(self, keys: list[str]) -> tuple[str, str]:
        """Return the question about the values of several keys, and the first words of its answer."""
        return (
            f"What are the {self.phrase}s for {', '.join(keys)} in the text above?",
            f"The {self.phrase}s are as follows.",
        )

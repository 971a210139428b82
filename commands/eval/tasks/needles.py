"""Needles in a haystack: sentences that tell a key's value, among others. The eight shapes of RULER (arXiv 2404.06654), our own words."""

import random
from dataclasses import dataclass
from enum import StrEnum

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
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
    NOISE = "noise"
    PROSE = "prose"
    NEEDLES = "needles"


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """Asks for the values of `num_asked` keys out of `num_keys`, each told `num_values` times; a haystack of needles has as many as fit."""

    name: str
    haystack: Haystack
    key: Kind = Kind.WORD
    value: Kind = Kind.NUMBER
    num_keys: int = 1
    num_asked: int = 1
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
            told = needles.first(size)
            return self._case(
                wording, " ".join(wording.tell(*needle) for needle in told), [told[int(depth * size)]]
            )

        return fit(write, num_tokens, count_tokens, least=1)

    def _hidden(
        self, rng: random.Random, wording: "_Wording", num_tokens: int, count_tokens: TokenCounter
    ) -> Case:
        keys = Supply(draw(self.key, rng)).first(self.num_keys)
        needles = [
            key
            for place, key in enumerate(keys)
            for _ in range(self.num_values if place < self.num_asked else 1)
        ]
        rng.shuffle(needles)
        told = list(zip(needles, draw(self.value, rng), strict=False))
        asked = [needle for key in keys[: self.num_asked] for needle in told if needle[0] == key]
        at = depths(rng, len(told))
        filler = Supply((noise if self.haystack is Haystack.NOISE else prose)(rng))
        statements = [wording.tell(*needle) for needle in told]
        return fit(
            lambda size: self._case(wording, hide(filler.first(size), statements, at), asked),
            num_tokens,
            count_tokens,
        )

    def _case(self, wording: "_Wording", haystack: str, asked: list[tuple[str, str]]) -> Case:
        keys = list(dict.fromkeys(key for key, _ in asked))
        values = tuple(value for _, value in asked)
        if len(keys) > 1:
            question, prefix = wording.ask_many(keys)
            answer = ", ".join(f"{key}: {value}" for key, value in asked)
        else:
            question, prefix = wording.ask(keys[0], len(values))
            answer = ", ".join(values)
        context = _PREAMBLE.format(phrase=wording.phrase) + haystack
        return Case(self.name, *prompted(context, question, prefix), f" {answer}.", values, Scoring.ALL)


@dataclass(frozen=True, slots=True)
class _Wording:
    phrase: str  # what a value is called
    statement: str

    def tell(self, key: str, value: str) -> str:
        return self.statement.format(phrase=self.phrase, key=key, value=value)

    def ask(self, key: str, num_values: int) -> tuple[str, str]:
        """Return the question for one key's values, and the beginning of its answer."""
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
        return (
            f"What are the {self.phrase}s for {', '.join(keys)} in the text above?",
            f"The {self.phrase}s are as follows.",
        )

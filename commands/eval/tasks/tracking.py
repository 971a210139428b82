"""Variable tracking: which variables got a value in the end, through several hops, beside chains that got others (RULER's vt)."""

import random
from dataclasses import dataclass
from itertools import pairwise

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
from commands.eval.tasks.filler import depths, hide, noise
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import numbers, plain_words

_WORDINGS = (
    ("VAR {new} = {value}.", "VAR {new} = VAR {old}."),
    ("Let {new} be {value}.", "Let {new} be the same as {old}."),
    ("Set {new} to {value}.", "Set {new} to {old}."),
)
_PREAMBLE = (
    "The text below gives values to variables, directly or by way of other variables. Keep track of them.\n\n"
)


@dataclass(frozen=True, slots=True)
class TrackingTask:
    """One chain of `num_hops` assignments after its first is asked for; `num_chains` are told, their statements interleaved."""

    name: str = "vt"
    num_chains: int = 4
    num_hops: int = 4

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        length = self.num_hops + 1
        names = rng.sample(plain_words(), self.num_chains * length)
        chains = [names[start : start + length] for start in range(0, len(names), length)]
        values = Supply(numbers(rng, num_digits=5)).first(self.num_chains)
        wording = rng.choice(_WORDINGS)
        statements = _interleaved(
            rng, [_told(wording, chain, value) for chain, value in zip(chains, values, strict=True)]
        )
        at, filler = depths(rng, len(statements)), Supply(noise(rng))

        def write(size: int) -> Case:
            context = _PREAMBLE + hide(filler.first(size), statements, at)
            question = f"Which variables hold the value {values[0]} in the text above? Name all of them in their order."
            parts = prompted(context, question, f"The variables that hold the value {values[0]} are")
            return Case(self.name, *parts, f" {', '.join(chains[0])}.", tuple(chains[0]), Scoring.ALL)

        return fit(write, num_tokens, count_tokens)


def _told(wording: tuple[str, str], chain: list[str], value: str) -> list[str]:
    first, hop = wording
    return [
        first.format(new=chain[0], value=value),
        *(hop.format(new=new, old=old) for old, new in pairwise(chain)),
    ]


def _interleaved(rng: random.Random, chains: list[list[str]]) -> list[str]:
    """Return all statements, those of a chain in their order."""
    turns = [chain for chain in map(iter, chains) for _ in chains[0]]
    rng.shuffle(turns)
    return [next(chain) for chain in turns]

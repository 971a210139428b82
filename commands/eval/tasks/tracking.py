"""Variable tracking: a chain of assignments among other chains (RULER's vt, arXiv 2404.06654)."""

import random
from dataclasses import dataclass
from itertools import pairwise

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
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
    """Requests all variables of one chain out of `num_chains`, whose statements are interleaved.

    A chain assigns a value to a first variable, then passes it on `num_hops` times.
    """

    name: str = "vt"
    num_chains: int = 4
    num_hops: int = 4

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        length = self.num_hops + 1
        names = rng.sample(plain_words(), self.num_chains * length)
        chains = [names[start : start + length] for start in range(0, len(names), length)]
        values = Supply(numbers(rng, num_digits=5)).first(self.num_chains)
        wording = rng.choice(_WORDINGS)
        chain_statements = [
            _statements(wording, chain, value) for chain, value in zip(chains, values, strict=True)
        ]
        statements = _interleaved(rng, chain_statements)
        positions = depths(rng, len(statements))
        filler = Supply(noise(rng))
        question = (
            f"Which variables hold the value {values[0]} in the text above? Name all of them in their order."
        )

        def write(size: int) -> Case:
            context = _PREAMBLE + hide(filler.first(size), statements, positions)
            parts = prompt_parts(context, question, f"The variables that hold the value {values[0]} are")
            return Case(self.name, *parts, f" {', '.join(chains[0])}.", tuple(chains[0]), Scoring.ALL)

        return fit(write, num_tokens, count_tokens)


def _statements(wording: tuple[str, str], chain: list[str], value: str) -> list[str]:
    """Return the statements of one chain, in order."""
    first, hop = wording
    return [
        first.format(new=chain[0], value=value),
        *(hop.format(new=new, old=old) for old, new in pairwise(chain)),
    ]


def _interleaved(rng: random.Random, chains: list[list[str]]) -> list[str]:
    """Return the statements of all chains in random order. The statements of one chain keep their order."""
    # Shuffle whose turn it is, not the statements themselves.
    turns = [chain for chain in map(iter, chains) for _ in chains[0]]
    rng.shuffle(turns)
    return [next(chain) for chain in turns]

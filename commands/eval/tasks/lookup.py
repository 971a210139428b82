"""Exact look-up: a value of a large JSON object by its key, and a pass key in noise (after ∞Bench, arXiv 2402.13718)."""

import random
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
from commands.eval.tasks.filler import hide, noise
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import numbers, uuids

_PASSKEYS = (
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "Here is the pass key: {key}. Do not forget that {key} is the pass key.",
    "Mind that {key} is the pass key. The pass key is {key}.",
)


@dataclass(frozen=True, slots=True)
class KeyValueTask:
    """A JSON object of UUIDs to UUIDs."""

    name: str = "kv_lookup"

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        pairs = Supply(zip(uuids(rng), uuids(rng), strict=False))
        depth = rng.random()

        def write(size: int) -> Case:
            told = pairs.first(size)
            key, value = told[int(depth * size)]
            listed = ", ".join(f'"{key}": "{value}"' for key, value in told)
            context = f"Below is a JSON object. A question about one of its values follows.\n\n{{{listed}}}"
            parts = prompted(context, f'What is the value of "{key}" in the JSON object above?', f'"{key}":')
            return Case(self.name, *parts, f' "{value}".', (value,), Scoring.PART)

        return fit(write, num_tokens, count_tokens, least=1)


@dataclass(frozen=True, slots=True)
class PasskeyTask:
    """A number of five digits in noise."""

    name: str = "passkey"

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        passkey = next(numbers(rng, num_digits=5))
        told, at, filler = rng.choice(_PASSKEYS).format(key=passkey), rng.random(), Supply(noise(rng))

        def write(size: int) -> Case:
            haystack = hide(filler.first(size), [told], [at])
            context = f"A pass key is hidden in the text below. Find it and remember it.\n\n{haystack}"
            parts = prompted(context, "What is the pass key in the text above?", "The pass key is")
            return Case(self.name, *parts, f" {passkey}.", (passkey,), Scoring.PART)

        return fit(write, num_tokens, count_tokens)

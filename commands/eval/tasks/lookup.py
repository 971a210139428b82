"""Exact retrieval: a value of a large JSON object by its key, and a pass key in noise.

After ∞Bench (arXiv 2402.13718).
"""

import random
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
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
    """A JSON object that maps UUIDs to UUIDs. The question is the value of one key."""

    name: str = "kv_lookup"

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        pairs = Supply(zip(uuids(rng), uuids(rng), strict=False))
        depth = rng.random()

        def write(size: int) -> Case:
            items = pairs.first(size)
            key, value = items[int(depth * size)]
            members = ", ".join(f'"{key}": "{value}"' for key, value in items)
            context = f"Below is a JSON object. A question about one of its values follows.\n\n{{{members}}}"
            question = f'What is the value of "{key}" in the JSON object above?'
            parts = prompt_parts(context, question, f'"{key}":')
            return Case(self.name, *parts, f' "{value}".', (value,), Scoring.PART)

        return fit(write, num_tokens, count_tokens, min_size=1)


@dataclass(frozen=True, slots=True)
class PasskeyTask:
    """A number of five digits hidden in repeated sentences."""

    name: str = "passkey"

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        passkey = next(numbers(rng, num_digits=5))
        statement = rng.choice(_PASSKEYS).format(key=passkey)
        depth = rng.random()
        filler = Supply(noise(rng))

        def write(size: int) -> Case:
            haystack = hide(filler.first(size), [statement], [depth])
            context = f"A pass key is hidden in the text below. Find it and remember it.\n\n{haystack}"
            parts = prompt_parts(context, "What is the pass key in the text above?", "The pass key is")
            return Case(self.name, *parts, f" {passkey}.", (passkey,), Scoring.PART)

        return fit(write, num_tokens, count_tokens)

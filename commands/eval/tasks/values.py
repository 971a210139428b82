"""Keys and values: words, numbers and UUIDs, endless and each only once."""

import random
import uuid
from collections.abc import Iterator
from enum import StrEnum
from functools import cache

from commands.eval.tasks.words import ADJECTIVES, NAMES, NOUNS, TOWNS


class Kind(StrEnum):
    WORD = "word"
    NUMBER = "number"
    UUID = "code"


def draw(kind: Kind, rng: random.Random) -> Iterator[str]:
    """Yield values of a kind, none of them twice."""
    return {Kind.WORD: compounds, Kind.NUMBER: numbers, Kind.UUID: uuids}[kind](rng)


def compounds(rng: random.Random) -> Iterator[str]:
    """Yield words such as "quiet-falcon". No noun comes again before all have come."""
    seen: set[str] = set()
    while True:
        for noun in rng.sample(NOUNS, len(NOUNS)):
            # Long texts of needles use more than there are pairs: then words grow.
            word = "-".join([*rng.choices(ADJECTIVES, k=1 + len(seen) // 20_000), noun])
            if word not in seen:
                seen.add(word)
                yield word


def numbers(rng: random.Random, num_digits: int = 7) -> Iterator[str]:
    """Yield numbers of so many digits."""
    seen: set[int] = set()
    while True:
        number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
        if number not in seen:
            seen.add(number)
            yield str(number)


def uuids(rng: random.Random) -> Iterator[str]:
    """Yield random UUIDs, which never meet."""
    while True:
        yield str(uuid.UUID(int=rng.getrandbits(128), version=4))


def people(rng: random.Random) -> Iterator[str]:
    """Yield names: plain ones first, and when these are used up, such as "Celia of Ashford"."""
    yield from rng.sample(NAMES, len(NAMES))
    for town in rng.sample(TOWNS, len(TOWNS)):
        yield from (f"{name} of {town}" for name in rng.sample(NAMES, len(NAMES)))


@cache
def plain_words() -> tuple[str, ...]:
    """Return words of which none is part of another: looking for one in an answer finds that one only."""
    words = sorted({*ADJECTIVES, *NOUNS})
    return tuple(word for word in words if not any(word in other for other in words if other != word))

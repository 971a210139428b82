"""Keys and values of cases: endless words, numbers and UUIDs without repeats."""

import random
import uuid
from collections.abc import Iterator
from enum import StrEnum
from functools import cache

from commands.eval.tasks.words import ADJECTIVES, NAMES, NOUNS, TOWNS


class Kind(StrEnum):
    """A kind of key or value. The text is its name in prompts."""

    WORD = "word"
    NUMBER = "number"
    UUID = "code"


def draw(kind: Kind, rng: random.Random) -> Iterator[str]:
    """Yield values of a kind, without repeats."""
    return {Kind.WORD: compounds, Kind.NUMBER: numbers, Kind.UUID: uuids}[kind](rng)


def compounds(rng: random.Random) -> Iterator[str]:
    """Yield words such as "quiet-falcon". Every noun is used once before any is used again."""
    seen: set[str] = set()
    while True:
        for noun in rng.sample(NOUNS, len(NOUNS)):
            # Long haystacks of needles need more words than there are pairs, so words get more adjectives.
            word = "-".join([*rng.choices(ADJECTIVES, k=1 + len(seen) // 20_000), noun])
            if word not in seen:
                seen.add(word)
                yield word


def numbers(rng: random.Random, num_digits: int = 7) -> Iterator[str]:
    """Yield numbers of `num_digits` digits."""
    seen: set[int] = set()
    while True:
        number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
        if number not in seen:
            seen.add(number)
            yield str(number)


def uuids(rng: random.Random) -> Iterator[str]:
    """Yield random UUIDs. A repeat is too unlikely to check for."""
    while True:
        yield str(uuid.UUID(int=rng.getrandbits(128), version=4))


def people(rng: random.Random) -> Iterator[str]:
    """Yield names: first plain ones, then names such as "Celia of Ashford"."""
    yield from rng.sample(NAMES, len(NAMES))
    for town in rng.sample(TOWNS, len(TOWNS)):
        yield from (f"{name} of {town}" for name in rng.sample(NAMES, len(NAMES)))


@cache
def plain_words() -> tuple[str, ...]:
    """Return words of which none is part of another, so that a search for one finds only that word."""
    words = sorted({*ADJECTIVES, *NOUNS})
    return tuple(word for word in words if not any(word in other for other in words if other != word))

"""Filler text: a few repeated sentences, or endless plain prose.

None of its words is a task's key or value.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TypeAlias

from commands.eval.tasks.words import DEEDS, PLACES, THINGS, TIMES

Sentences: TypeAlias = Iterator[str]

_NOISE = (
    (
        "The water is cold.",
        "The stones are dry.",
        "The path is straight.",
        "On it goes.",
        "Up and then down.",
    ),
    (
        "The wood is dark.",
        "The air is still.",
        "The moss is wet.",
        "Step by step.",
        "Now left and now right.",
    ),
    ("The sand is hot.", "The waves are high.", "The shore is long.", "Away we sail.", "Out and home again."),
)
_PROSE = (
    "The {thing} {deed} near the {place}.",
    "In the {time} the {thing} {deed}.",
    "The {thing} {deed} and the {thing2} {deed2}.",
    "Nobody {deed} in the {place} that {time}.",
    "The {place} is behind the {place2}.",
    "Every {time} the {thing} {deed} at the {place} and {deed2} there.",
    "Once the {thing} {deed}, the {thing2} {deed2} too.",
    "It was {time}, and the {thing} {deed} by the {place}.",
    "From the {place} to the {place2} the {thing} {deed}.",
)


def noise(rng: random.Random) -> Sentences:
    """Yield the same few sentences repeatedly, without end."""
    return cycle(rng.choice(_NOISE))


def prose(rng: random.Random) -> Sentences:
    """Yield random sentences without end."""
    while True:
        yield rng.choice(_PROSE).format(
            thing=rng.choice(THINGS),
            thing2=rng.choice(THINGS),
            deed=rng.choice(DEEDS),
            deed2=rng.choice(DEEDS),
            place=rng.choice(PLACES),
            place2=rng.choice(PLACES),
            time=rng.choice(TIMES),
        )


def depths(rng: random.Random, count: int) -> list[float]:
    """Return `count` depths in ascending order, each from 0 (start of the text) to below 1 (its end)."""
    return sorted(rng.random() for _ in range(count))


def hide(sentences: Sequence[str], statements: Sequence[str], at_depths: Sequence[float]) -> str:
    """Return the sentences as one text, with each statement inserted at its depth. Depths ascend."""
    pieces: list[str] = []
    start = 0
    for statement, depth in zip(statements, at_depths, strict=True):
        end = int(depth * (len(sentences) + 1))
        pieces += sentences[start:end]
        pieces.append(statement)
        start = end
    return " ".join([*pieces, *sentences[start:]])

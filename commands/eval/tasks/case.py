"""What a task makes: one question over one long context, with what a right answer holds."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

TokenCounter: TypeAlias = Callable[[str], int]
"""How many tokens a text is, special tokens left out."""


class LengthError(ValueError):
    """A task's shortest case has more tokens than were asked for."""


class Scoring(StrEnum):
    """How an answer is compared with the references."""

    ALL = "all"  # the share of the references that it holds
    PART = "part"  # whether it holds any of them
    RECORDS = "records"  # intersection over union of the JSON records' (entry, field, value)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: context, question and the first words of an answer, each with its own line breaks, which a model goes on from.

    `answer` is how a perfect model would go on: what training teaches, and how long an answer may be. `references` are what is looked for
    in it.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answer: str
    references: tuple[str, ...]
    scoring: Scoring

    @property
    def prompt(self) -> str:
        return self.context + self.question + self.answer_prefix


class Task(Protocol):
    """One kind of case."""

    @property
    def name(self) -> str: ...

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        """Return a case whose prompt has at most `num_tokens` tokens, and hardly fewer. Raises `LengthError`."""
        ...


def prompted(context: str, question: str, answer_prefix: str) -> tuple[str, str, str]:
    """Return the three parts of a prompt. Line breaks end a part rather than begin the next: tokens rarely span such a border."""
    return f"{context}\n\n", f"Question: {question}\n", f"Answer: {answer_prefix}"

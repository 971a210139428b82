"""A case of a task: one question over one long context, with the strings that a right answer contains."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

TokenCounter: TypeAlias = Callable[[str], int]
"""Returns the number of tokens of a text, without special tokens."""


class LengthError(ValueError):
    """A task's shortest case has more tokens than requested."""


class Scoring(StrEnum):
    """The score of an answer, given the references."""

    ALL = "all"  # the share of the references that the answer contains
    PART = "part"  # 1 if the answer contains any reference
    RECORDS = "records"  # intersection over union of the JSON records' (entry, field, value) triples


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt in three parts: context, question and the first words of the answer. A model continues it.

    `answer` is the perfect continuation: the target of training, and the measure of an answer's length limit.
    `references` are the strings that scoring looks for.
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
        """Return a case whose prompt has at most `num_tokens` tokens, and little less.

        Raises `LengthError`.
        """
        ...


def prompt_parts(context: str, question: str, answer_prefix: str) -> tuple[str, str, str]:
    """Return the three parts of a prompt with their line breaks."""
    # A line break ends a part, because tokens rarely span a line break: prefill may end between two parts.
    return f"{context}\n\n", f"Question: {question}\n", f"Answer: {answer_prefix}"

"""The tasks of `snapserve eval prose`: what is hidden in the document, and the question about it.

They know no tokenizer, no haystack's length and no position of the question.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from commands.eval.prose.paraphrases import PARAPHRASES
from commands.eval.prose.wordings import (
    CHANGES,
    CODE,
    COLOUR,
    DATE,
    EXTRACTIONS,
    FIELDS,
    LATEST,
    PERSON,
    PHONE,
    PRICE,
    PRIZE,
    RECORDS,
    SERIAL,
    TOWN,
    Kind,
    person,
)
from commands.eval.tasks.case import Scoring
from server.options.command_line import OptionError

_WORDS = (COLOUR, PERSON, TOWN, DATE, PRICE, PRIZE)
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Facts:
    """The statements to hide, in their order in the document, and the question about them.

    `answer_prefix` are the first words of an answer and `answer` is the perfect continuation. `references`
    are the strings that scoring looks for.
    """

    statements: Sequence[str]
    question: str
    answer_prefix: str
    answer: str
    references: tuple[str, ...]
    scoring: Scoring = Scoring.ALL


class ProseTask(Protocol):
    """One kind of case."""

    @property
    def name(self) -> str: ...

    def draw(self, rng: random.Random, text: str) -> Facts:
        """Return facts whose values do not occur in `text`, which is in lower case.

        Raises `OptionError` for a text in which too many values occur.
        """
        ...


@dataclass(frozen=True, slots=True)
class FactTask:
    """Requests one fact. `num_others` facts of its kind and wording, with other keys, are hidden too."""

    name: str
    kinds: Sequence[Kind]
    num_others: int = 0

    def draw(self, rng: random.Random, text: str) -> Facts:
        kind = rng.choice(self.kinds)
        keys = rng.sample(kind.keys, 1 + self.num_others)
        values = _distinct(kind.value, len(keys), rng, text)
        statement = rng.choice(kind.statements)
        statements = [statement.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
        rng.shuffle(statements)
        question = rng.choice(kind.questions).format(key=keys[0])
        return Facts(statements, question, _prefix(kind, keys[0]), values[0], (values[0],))


@dataclass(frozen=True, slots=True)
class SeveralFactsTask:
    """Requests `num_facts` facts of different kinds at once."""

    name: str = "several"
    num_facts: int = 4

    def draw(self, rng: random.Random, text: str) -> Facts:
        kinds = rng.sample((CODE, *_WORDS), self.num_facts)
        keys = [rng.choice(kind.keys) for kind in kinds]
        values = [_distinct(kind.value, 1, rng, text)[0] for kind in kinds]
        statements = [
            rng.choice(kind.statements).format(key=key, value=value)
            for kind, key, value in zip(kinds, keys, values, strict=True)
        ]
        rng.shuffle(statements)
        questions = [
            f"({index}) {rng.choice(kind.questions).format(key=key)}"
            for index, (kind, key) in enumerate(zip(kinds, keys, strict=True), 1)
        ]
        answer = " ".join(f"({index}) {value}" for index, value in enumerate(values, 1))
        question = f"I have {self.num_facts} questions. {' '.join(questions)}"
        return Facts(statements, question, "The answers are:", answer, tuple(values))


@dataclass(frozen=True, slots=True)
class RecordTask:
    """Requests one field of one record of several fields out of `num_records`."""

    name: str = "record"
    num_records: int = 3

    def draw(self, rng: random.Random, text: str) -> Facts:
        wording = rng.choice(RECORDS)
        records = _records(self.num_records, rng, text)
        statements = [wording.format(**record) for record in records]
        rng.shuffle(statements)
        field = rng.choice(list(FIELDS))
        _, prefix, questions = FIELDS[field]
        question = rng.choice(questions).format(**records[0])
        answer = records[0][field]
        return Facts(statements, question, prefix.format(**records[0]), answer, (answer,))


@dataclass(frozen=True, slots=True)
class ExtractionTask:
    """Requests all records, each in other words, as JSON (after Text2JSON of arXiv 2604.08426)."""

    name: str = "records"
    num_records: int = 4

    def draw(self, rng: random.Random, text: str) -> Facts:
        records = _records(self.num_records, rng, text)
        wordings = rng.sample(RECORDS, self.num_records)
        statements = [wording.format(**record) for wording, record in zip(wordings, records, strict=True)]
        question = rng.choice(EXTRACTIONS).format(count=self.num_records)
        lines = tuple(json.dumps(record) for record in records)
        return Facts(statements, question, "[", ", ".join(lines) + "]", lines, Scoring.RECORDS)


@dataclass(frozen=True, slots=True)
class ChangedFactTask:
    """States a fact and later its change, and requests the latest value."""

    name: str = "changed"

    def draw(self, rng: random.Random, text: str) -> Facts:
        kind = rng.choice((CODE, *_WORDS))
        key = rng.choice(kind.keys)
        old, new = _distinct(kind.value, 2, rng, text)
        change = rng.choice(CHANGES).format(fact=kind.plain.format(key=key, value=new))
        statements = [rng.choice(kind.statements).format(key=key, value=old), change]
        question = rng.choice(LATEST).format(question=rng.choice(kind.questions).format(key=key))
        return Facts(statements, question, _prefix(kind, key), new, (new,))


@dataclass(frozen=True, slots=True)
class OtherWordsTask:
    """Requests one fact in words of which its statement has none."""

    name: str = "other_words"

    def draw(self, rng: random.Random, text: str) -> Facts:
        kind = rng.choice(PARAPHRASES)
        in_statement, in_question = rng.choice(kind.pairs)
        (value,) = _distinct(kind.value, 1, rng, text)
        statement = rng.choice(kind.statements).format(key=in_statement, value=value)
        question = rng.choice(kind.questions).format(key=in_question)
        return Facts([statement], question, kind.answer_prefix, value, (value,))


_SUITE: tuple[ProseTask, ...] = (
    FactTask("code", (CODE,)),
    FactTask("words", _WORDS),
    SeveralFactsTask(),
    FactTask("among_similar", (CODE, *_WORDS), num_others=7),
    FactTask("long_value", (SERIAL, PHONE)),
    RecordTask(),
    ExtractionTask(),
    ChangedFactTask(),
    OtherWordsTask(),
)
PROSE_TASKS = MappingProxyType({task.name: task for task in _SUITE})


def _prefix(kind: Kind, key: str) -> str:
    """Return the first words of an answer: the plain statement up to its value."""
    return kind.plain.format(key=key, value="").rstrip()


def _records(count: int, rng: random.Random, text: str) -> list[Mapping[str, str]]:
    """Return records of a person with a value of each of `FIELDS`, all different."""
    fields = {name: _distinct(value, count, rng, text) for name, (value, _, _) in FIELDS.items()}
    fields = {"person": _distinct(person, count, rng, text)} | fields
    return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def _distinct(draw: Callable[[random.Random], str], count: int, rng: random.Random, text: str) -> list[str]:
    """Return `count` different values that do not occur in the text. Raises `OptionError`."""
    values: list[str] = []
    for _ in range(_MAX_DRAWS):
        if len(values) == count:
            return values
        value = draw(rng)
        if value not in values and value.lower() not in text:
            values.append(value)
    raise OptionError(f"--haystack must not contain the values of the facts, got one with {value}")

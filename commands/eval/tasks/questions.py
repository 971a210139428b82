"""Questions about documents, each about one fictional person (after RULER's QA, arXiv 2404.06654).

A question needs one hop, or two: through the person's teacher.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompt_parts
from commands.eval.tasks.filler import prose
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import people
from commands.eval.tasks.words import JOBS, PETS, TOWNS

_PREAMBLE = "The documents below each tell of one person. A question about one of them follows.\n\n"


@dataclass(frozen=True, slots=True)
class _Topic:
    """A kind of fact: the verb of its statement, its question, and its possible values."""

    verb: str
    question: str
    values: tuple[str, ...]


_TOPICS = (
    (
        _Topic("lives in", "In which town does {who} live?", TOWNS),
        _Topic("has a home in", "In which town does {who} have a home?", TOWNS),
    ),
    (
        _Topic("works as a", "What does {who} work as?", JOBS),
        _Topic("earns a living as a", "What does {who} earn a living as?", JOBS),
    ),
    (
        _Topic("keeps a", "Which animal does {who} keep?", PETS),
        _Topic("owns a", "Which animal does {who} own?", PETS),
    ),
)


@dataclass(frozen=True, slots=True)
class _Person:
    name: str
    values: tuple[str, ...]  # one for each topic
    order: tuple[int, ...]  # of the topics in the document
    teacher: float  # the teacher's position, as a share of the other people
    aside: str  # a filler sentence


@dataclass(frozen=True, slots=True)
class QuestionTask:
    """Requests a fact about a person, or about that person's teacher."""

    name: str
    is_two_hop: bool

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        topics = tuple(rng.choice(variants) for variants in _TOPICS)
        topic_index = rng.randrange(len(topics))
        depth = rng.random()
        supply = Supply(_people(rng))

        def write(size: int) -> Case:
            people = supply.first(size)
            teachers = [
                people[_other_index(index, person.teacher, size)] for index, person in enumerate(people)
            ]
            documents = (
                _document(number, person, teacher.name, topics)
                for number, (person, teacher) in enumerate(zip(people, teachers, strict=True), 1)
            )
            queried = int(depth * size)
            return self._case(
                "\n".join(documents), people[queried], teachers[queried], topics[topic_index], topic_index
            )

        return fit(write, num_tokens, count_tokens, min_size=2)

    def _case(
        self, documents: str, person: _Person, teacher: _Person, topic: _Topic, topic_index: int
    ) -> Case:
        if self.is_two_hop:
            value = teacher.values[topic_index]
            question = topic.question.format(who=f"the teacher of {person.name}")
            prefix = f"The teacher of {person.name} is"
            answer = f" {teacher.name}. {teacher.name} {topic.verb} {value}."
        else:
            value = person.values[topic_index]
            question = topic.question.format(who=person.name)
            prefix = f"{person.name} {topic.verb}"
            answer = f" {value}."
        parts = prompt_parts(_PREAMBLE + documents, question, prefix)
        return Case(self.name, *parts, answer, (value,), Scoring.PART)


def _people(rng: random.Random) -> Iterator[_Person]:
    asides = prose(rng)
    for name in people(rng):
        values = tuple(rng.choice(variants[0].values) for variants in _TOPICS)
        order = tuple(rng.sample(range(len(_TOPICS)), len(_TOPICS)))
        yield _Person(name, values, order, rng.random(), next(asides))


def _document(number: int, person: _Person, teacher: str, topics: tuple[_Topic, ...]) -> str:
    facts = [f"{person.name} {topics[index].verb} {person.values[index]}." for index in person.order]
    return f"Document {number}. {' '.join(facts)} {person.aside} The teacher of {person.name} is {teacher}."


def _other_index(index: int, share: float, size: int) -> int:
    """Return an index below `size` other than `index`, chosen by a share from 0 to below 1."""
    return (index + 1 + int(share * (size - 1))) % size

"""Questions about documents, each of which tells of one made-up person: one hop, or two by way of that person's teacher (RULER's QA)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from commands.eval.tasks.case import Case, Scoring, TokenCounter, prompted
from commands.eval.tasks.filler import prose
from commands.eval.tasks.fitting import Supply, fit
from commands.eval.tasks.values import people
from commands.eval.tasks.words import JOBS, PETS, TOWNS

_PREAMBLE = "The documents below each tell of one person. A question about one of them follows.\n\n"


@dataclass(frozen=True, slots=True)
class _Topic:
    """A fact's verb, as a statement and an answer have it, and the question."""

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
    values: tuple[str, ...]  # one a topic
    order: tuple[int, ...]  # in which the topics are told
    teacher: float  # as a share of the people
    aside: str


@dataclass(frozen=True, slots=True)
class QuestionTask:
    """Asks for a fact about a person, or about that person's teacher."""

    name: str
    is_two_hop: bool

    def make(self, rng: random.Random, num_tokens: int, count_tokens: TokenCounter) -> Case:
        topics = tuple(rng.choice(variants) for variants in _TOPICS)
        topic, depth = rng.randrange(len(topics)), rng.random()
        supply = Supply(_people(rng))

        def write(size: int) -> Case:
            told = supply.first(size)
            teachers = [told[_other(place, person.teacher, size)] for place, person in enumerate(told)]
            documents = (
                _document(number, person, teacher.name, topics)
                for number, (person, teacher) in enumerate(zip(told, teachers, strict=True), 1)
            )
            place = int(depth * size)
            return self._case("\n".join(documents), told[place], teachers[place], topics[topic], topic)

        return fit(write, num_tokens, count_tokens, least=2)

    def _case(self, documents: str, person: _Person, teacher: _Person, topic: _Topic, index: int) -> Case:
        about = teacher if self.is_two_hop else person
        value = about.values[index]
        if self.is_two_hop:
            question, prefix = (
                topic.question.format(who=f"the teacher of {person.name}"),
                f"The teacher of {person.name} is",
            )
            answer = f" {teacher.name}. {teacher.name} {topic.verb} {value}."
        else:
            question, prefix, answer = (
                topic.question.format(who=person.name),
                f"{person.name} {topic.verb}",
                f" {value}.",
            )
        return Case(
            self.name, *prompted(_PREAMBLE + documents, question, prefix), answer, (value,), Scoring.PART
        )


def _people(rng: random.Random) -> Iterator[_Person]:
    asides = prose(rng)
    for name in people(rng):
        values = tuple(rng.choice(variants[0].values) for variants in _TOPICS)
        order = tuple(rng.sample(range(len(_TOPICS)), len(_TOPICS)))
        yield _Person(name, values, order, rng.random(), next(asides))


def _document(number: int, person: _Person, teacher: str, topics: tuple[_Topic, ...]) -> str:
    facts = [f"{person.name} {topics[index].verb} {person.values[index]}." for index in person.order]
    return f"Document {number}. {' '.join(facts)} {person.aside} The teacher of {person.name} is {teacher}."


def _other(place: int, share: float, size: int) -> int:
    """Return somebody's place that is not `place`."""
    return (place + 1 + int(share * (size - 1))) % size

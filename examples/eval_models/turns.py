"""Many questions about one text: what else a case's context can be asked, in the case's own wording.

A generated case asks one thing of a long text. Training on it alone learns little for each token read, so the other facts of the text are
read back from it and asked as well. Knows the tasks' wording, and nothing of tokens.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from commands.eval.tasks.case import Case

_NEEDLE = re.compile(r" for (\S+) is (\S+)\.(?=\s|$)")
_PAIR = re.compile(r'"([0-9a-f-]{36})": "([0-9a-f-]{36})"')
_TEACHER = re.compile(r"The teacher of ([^.]+?) is ([^.]+)\.")
_FIRSTS = (r"VAR (\S+) = (\d+)\.", r"Let (\S+) be (\d+)\.", r"Set (\S+) to (\d+)\.")
_HOPS = (r"VAR (\S+) = VAR (\S+)\.", r"Let (\S+) be the same as (\S+)\.", r"Set (\S+) to ([^\d\s]+)\.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, the first words of its answer, and how the answer goes on."""

    question: str
    answer_prefix: str
    answer: str


def turns(case: Case, rng: random.Random) -> list[Turn]:
    """Return the case's own turn and others about the same context, in random order and
    with repetition: were none asked twice, guessing among those not asked yet would pay. Chains are asked once each, as copying an earlier
    answer would take the place of following them.
    """
    own = Turn(case.question, case.answer_prefix, case.answer)
    again = _AGAIN.get(case.task)
    if again is None:
        return [own]
    others = again(case, own)
    if case.task == "vt":
        return [own, *rng.sample(others, len(others))]
    return [own, *rng.choices(others, k=2 * len(others))]


def _renamed(turn: Turn, old: tuple[str, str], new: tuple[str, str]) -> Turn:
    """Put another key and its answer's value in the place of the turn's."""
    (old_key, old_value), (key, value) = old, new
    return Turn(
        turn.question.replace(old_key, key),
        turn.answer_prefix.replace(old_key, key),
        turn.answer.replace(old_key, key).replace(old_value, value),
    )


def _needles(case: Case, own: Turn) -> list[Turn]:
    told = _NEEDLE.findall(case.context)
    asked = next(needle for needle in told if needle[1] == case.references[0])
    return [_renamed(own, asked, needle) for needle in told]


def _pairs(case: Case, own: Turn) -> list[Turn]:
    told = _PAIR.findall(case.context)
    asked = next(pair for pair in told if pair[1] == case.references[0])
    return [_renamed(own, asked, pair) for pair in told]


def _chains(case: Case, own: Turn) -> list[Turn]:
    firsts = next(found for pattern in _FIRSTS if (found := re.findall(pattern, case.context)))
    following = {old: new for pattern in _HOPS for new, old in re.findall(pattern, case.context)}
    asked = next(value for name, value in firsts if name == case.references[0])
    turns = []
    for name, value in firsts:
        chain = [name]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        if value != asked:
            turns.append(
                Turn(
                    own.question.replace(asked, value),
                    own.answer_prefix.replace(asked, value),
                    f" {', '.join(chain)}.",
                )
            )
    return turns


def _people(case: Case, own: Turn) -> list[Turn]:
    """Ask the same topic of everybody."""
    teachers = dict(_TEACHER.findall(case.context))
    if case.task == "qa_2":
        name = own.answer_prefix.removeprefix("Answer: The teacher of ").removesuffix(" is")
        verb = (
            own.answer.split(". ", 1)[1]
            .removeprefix(teachers[name] + " ")
            .removesuffix(f" {case.references[0]}.")
        )
    else:
        name = next(
            person
            for person in sorted(teachers, key=len, reverse=True)
            if own.answer_prefix.startswith(f"Answer: {person} ")
        )
        verb = own.answer_prefix.removeprefix(f"Answer: {name} ")
    values = dict(re.findall(rf"(?:^|[.] )([^.]+?) {verb} ([^.]+)\.", case.context))
    turns = []
    for person, teacher in teachers.items():
        question, prefix = own.question.replace(name, person), own.answer_prefix.replace(name, person)
        answer = (
            f" {teacher}. {teacher} {verb} {values[teacher]}."
            if case.task == "qa_2"
            else f" {values[person]}."
        )
        turns.append(Turn(question, prefix, answer))
    return turns


_AGAIN: dict[str, Callable[[Case, Turn], list[Turn]]] = {
    "niah_multikey_1": _needles,
    "niah_multikey_2": _needles,
    "niah_multikey_3": _needles,
    "kv_lookup": _pairs,
    "vt": _chains,
    "qa_1": _people,
    "qa_2": _people,
}

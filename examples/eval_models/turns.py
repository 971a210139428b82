"""Further questions about a case's context, in the case's wording.

A generated case has one question about a long text, which teaches little for each token read. So the other
facts are parsed from the text and become questions as well. This module knows the tasks' wording, not tokens.
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
    """A question, the first words of its answer, and the rest of the answer."""

    question: str
    answer_prefix: str
    answer: str


def turns(case: Case, rng: random.Random) -> list[Turn]:
    """Return the case's own turn and others about the same context, in random order and with repetition.

    Without repetition, a guess among the facts without a question so far would be rewarded. Chains occur once
    each, because the model would copy an earlier answer instead of following the chain.
    """
    own = Turn(case.question, case.answer_prefix, case.answer)
    find_others = _OTHERS.get(case.task)
    if find_others is None:
        return [own]
    others = find_others(case, own)
    if case.task == "vt":
        return [own, *rng.sample(others, len(others))]
    return [own, *rng.choices(others, k=2 * len(others))]


def _renamed(turn: Turn, old: tuple[str, str], new: tuple[str, str]) -> Turn:
    """Replace the turn's key and value by others."""
    old_key, old_value = old
    key, value = new
    return Turn(
        turn.question.replace(old_key, key),
        turn.answer_prefix.replace(old_key, key),
        turn.answer.replace(old_key, key).replace(old_value, value),
    )


def _needles(case: Case, own: Turn) -> list[Turn]:
    needles = _NEEDLE.findall(case.context)
    own_pair = next(needle for needle in needles if needle[1] == case.references[0])
    return [_renamed(own, own_pair, needle) for needle in needles]


def _pairs(case: Case, own: Turn) -> list[Turn]:
    pairs = _PAIR.findall(case.context)
    own_pair = next(pair for pair in pairs if pair[1] == case.references[0])
    return [_renamed(own, own_pair, pair) for pair in pairs]


def _chains(case: Case, own: Turn) -> list[Turn]:
    firsts = next(found for pattern in _FIRSTS if (found := re.findall(pattern, case.context)))
    following = {old: new for pattern in _HOPS for new, old in re.findall(pattern, case.context)}
    own_value = next(value for name, value in firsts if name == case.references[0])
    turns = []
    for name, value in firsts:
        chain = [name]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        if value != own_value:
            turns.append(
                Turn(
                    own.question.replace(own_value, value),
                    own.answer_prefix.replace(own_value, value),
                    f" {', '.join(chain)}.",
                )
            )
    return turns


def _people(case: Case, own: Turn) -> list[Turn]:
    """Return the same question about every person."""
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
        question = own.question.replace(name, person)
        prefix = own.answer_prefix.replace(name, person)
        answer = (
            f" {teacher}. {teacher} {verb} {values[teacher]}."
            if case.task == "qa_2"
            else f" {values[person]}."
        )
        turns.append(Turn(question, prefix, answer))
    return turns


_OTHERS: dict[str, Callable[[Case, Turn], list[Turn]]] = {
    "niah_multikey_1": _needles,
    "niah_multikey_2": _needles,
    "niah_multikey_3": _needles,
    "kv_lookup": _pairs,
    "vt": _chains,
    "qa_1": _people,
    "qa_2": _people,
}

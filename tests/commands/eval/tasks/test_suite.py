"""Every task's cases, for tokenizers of different kinds.

Checked are the length, repetition by the seed, that the answer occurs once, and that it scores as right.
"""

import random
from collections import Counter

import pytest
from tokenizers import Tokenizer

from commands.eval.scoring import score
from commands.eval.tasks.case import Case, LengthError, Scoring, TokenCounter
from commands.eval.tasks.suite import TASKS, case_source
from commands.eval.tasks.values import Kind, draw, people, plain_words
from commands.eval.tasks.words import ADJECTIVES, DEEDS, JOBS, NAMES, NOUNS, PLACES, THINGS, TIMES, TOWNS
from server.options.models import DEMO_MODEL

LENGTH = 1500
RULER = 13

_demo = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def demo_tokens(text: str) -> int:
    return len(_demo.encode(text, add_special_tokens=False).ids)


COUNTERS: dict[str, TokenCounter] = {
    "demo": demo_tokens,
    "words": lambda text: len(text.split()),
    "half characters": lambda text: len(text) // 2,
}
every_task = pytest.mark.parametrize("name", TASKS)


def case_of(
    name: str, index: int = 0, count_tokens: TokenCounter = demo_tokens, num_tokens: int = LENGTH
) -> Case:
    return TASKS[name].make(case_source(name, 0, index), num_tokens, count_tokens)


def test_suite_has_the_thirteen_ruler_tasks_and_three_more() -> None:
    assert list(TASKS)[RULER:] == ["kv_lookup", "passkey", "text2json"]
    assert len(TASKS) == RULER + 3
    assert all(TASKS[name].name == name for name in TASKS)


@every_task
@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("num_tokens", [LENGTH, 4096])
def test_the_length_is_reached_and_never_exceeded(name: str, counter: str, num_tokens: int) -> None:
    count = COUNTERS[counter]
    one_more = 150  # the longest unit: two UUIDs, or a document about a person
    lengths = [count(case_of(name, index, count, num_tokens).prompt) for index in range(3)]
    assert all(num_tokens - one_more <= length <= num_tokens for length in lengths)


@every_task
def test_too_short_a_length_is_refused_with_what_is_needed(name: str) -> None:
    with pytest.raises(LengthError, match=rf"{name} needs at least \d+ tokens, got num_tokens 5"):
        case_of(name, num_tokens=5)


@every_task
def test_cases_depend_on_seed_split_and_index(name: str) -> None:
    assert case_of(name) == case_of(name)
    assert case_of(name, 1) != case_of(name)
    assert TASKS[name].make(case_source(name, 0, 0, "train"), LENGTH, demo_tokens) != case_of(name)


@every_task
def test_the_perfect_answer_scores_one_and_others_do_not(name: str) -> None:
    case, other = case_of(name), case_of(name, 1)
    assert score(case, case.answer) == 1
    assert score(case, "") == 0
    assert score(case, other.answer) < 1


@every_task
def test_wordings_and_answer_positions_vary_with_the_seed(name: str) -> None:
    cases = [case_of(name, index) for index in range(8)]
    assert len({case.answer for case in cases}) == len(cases)
    if name.startswith(("niah", "passkey", "kv")):
        assert (
            len({round(case.context.index(case.references[0]) / len(case.context), 1) for case in cases}) > 3
        )


NEEDLES = [name for name in TASKS if name.startswith("niah") or name == "kv_lookup"]


@pytest.mark.parametrize("name", NEEDLES)
def test_every_value_occurs_once_and_not_in_the_question(name: str) -> None:
    for index in range(10):
        case = case_of(name, index)
        assert all(case.context.count(value) == 1 for value in case.references)
        assert not any(value in case.question + case.answer_prefix for value in case.references)


def test_a_tracked_chain_precedes_each_hop_and_chains_are_disjoint() -> None:
    case = case_of("vt")
    value = case.question.split("value ")[1].split()[0]
    places = [case.context.index(f" {name} ") for name in case.references]
    assert places == sorted(places)
    assert case.context.count(value) == 1
    assert len(case.references) == 5


def test_common_words_occur_far_more_often_than_any_other() -> None:
    case = case_of("cwe", num_tokens=4096)
    counts = Counter(word for word in case.context.split("\n\n")[1].split() if not word.endswith("."))
    common, others = counts.most_common(10), counts.most_common()[10:]
    assert {word for word, _ in common} == set(case.references)
    assert min(count for _, count in common) >= 5 * max(count for _, count in others)
    assert sorted(case.references, key=case.context.index) == list(case.references)


def test_frequent_words_occur_far_more_often_than_any_other() -> None:
    case = case_of("fwe")
    counts = Counter(case.context.split("\n\n")[1].split()).most_common(4)
    assert tuple(word for word, _ in counts[:3]) == case.references
    assert counts[2][1] > 1.5 * counts[3][1]


@pytest.mark.parametrize("index", range(10))
def test_the_two_hops_lead_to_the_answer(index: int) -> None:
    case = case_of("qa_2", index)
    person = case.answer_prefix.removeprefix("Answer: The teacher of ").removesuffix(" is")
    teacher = case.context.split(f"The teacher of {person} is ")[1].split(".")[0]
    assert teacher != person
    fact = case.answer.removeprefix(f" {teacher}. ")
    assert case.context.count(fact) == 1


@pytest.mark.parametrize("index", range(10))
def test_the_single_hop_occurs_once(index: int) -> None:
    case = case_of("qa_1", index)
    assert case.context.count(case.answer_prefix.removeprefix("Answer: ") + case.answer) == 1


@pytest.mark.parametrize(("num_tokens", "num_records"), [(600, 2), (1024, 2), (2048, 4), (8192, 8)])
def test_records_grow_with_the_length(num_tokens: int, num_records: int) -> None:
    case = case_of("text2json", num_tokens=num_tokens)
    assert len(case.references) == num_records
    assert score(case, f"[{case.references[0]}]") == pytest.approx(1 / num_records)


@pytest.mark.parametrize("kind", Kind)
def test_values_are_distinct(kind: Kind) -> None:
    values = draw(kind, random.Random(0))
    drawn = [next(values) for _ in range(25_000)]
    assert len(set(drawn)) == len(drawn)


def test_people_continue_when_names_are_used_up() -> None:
    names = people(random.Random(0))
    drawn = [next(names) for _ in range(2000)]
    assert len(set(drawn)) == len(drawn)


def test_no_plain_word_is_part_of_another() -> None:
    words = plain_words()
    assert len(words) > 350  # a list of common words needs as many
    assert not any(word in other for word in words for other in words if word != other)


def test_filler_has_no_word_of_a_key_or_value() -> None:
    filler = {*PLACES, *THINGS, *DEEDS, *TIMES}
    assert filler.isdisjoint({*NAMES, *ADJECTIVES, *NOUNS, *TOWNS, *JOBS})


def test_scores_are_computed() -> None:
    def case(scoring: Scoring, *references: str) -> Case:
        return Case("any", "", "", "", "", references, scoring)

    assert score(case(Scoring.ALL, "one", "two"), "It is ONE.") == 0.5
    assert score(case(Scoring.PART, "one", "two"), "It is ONE.") == 1
    wanted = case(Scoring.RECORDS, '{"entry": 1, "a": "x", "b": 2}', '{"entry": 2, "a": "y", "b": 3}')
    assert score(wanted, '[{"entry": 1, "a": "x", "b": "2"}, {"entry": 2, "a": "y", "b": 3}]') == 1
    assert score(wanted, '[{"entry": 1, "a": "x", "b": 9}]') == pytest.approx(2 / 7)
    assert score(wanted, '{"entry": 1, "a": "x", "b": 2} {"entry": 2, "a": "y", "b"') == 0.5
    assert score(wanted, "{broken}, [1]") == 0

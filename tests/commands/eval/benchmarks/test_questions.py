"""LongBench v2 and AIME 2024: their files and how answers are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands.eval.benchmarks.aime24 import Aime24, final_number
from commands.eval.benchmarks.benchmark import Benchmark, read_questions
from commands.eval.benchmarks.longbench_v2 import LongBenchV2, choice
from commands.eval.benchmarks.suite import BENCHMARKS
from server.options.command_line import OptionError

LONG: dict[str, Any] = {
    "_id": "66",
    "domain": "Single-Document QA",
    "sub_domain": "Legal",
    "difficulty": "easy",
    "length": "short",
}
LONG |= {
    "question": "Who? ",
    "choice_A": "one",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "B",
}
LONG |= {"context": "A {brace} and a text."}


def test_longbench_scores() -> None:
    question = LongBenchV2().question(LONG)
    assert (
        "<text>\nA {brace} and a text.\n</text>\n\n"
        "What is the correct answer to this question: Who?\nChoices:\n(A) one\n" in question.prompt
    )
    assert question.prompt.endswith('"The correct answer is (insert answer here)".')
    assert (question.groups, question.may_be_cut) == (("easy", "short"), True)
    assert question.score("The correct answer is (B) two") == 1
    assert question.score("It is B") == 0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is (C).", "C"),
        ("**The correct answer is D**", "D"),
        ("The correct answer is A? No: The correct answer is (B)", "B"),
        ("The correct answer is (E)", None),
        ("A", None),
    ],
)
def test_the_choice_is_extracted_from_an_answer(text: str, letter: str | None) -> None:
    assert choice(text) == letter


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so \\boxed{12}, or rather \\boxed{ 033 }. In 2024.", 33),
        ("\\boxed{\\text{answer } 104}", 104),
        ("\\boxed{\\dfrac{m}{n}} with m+n = 7", None),
        ("we have 1,024 and then 204.", 204),
        ("it is 3.5", None),
        ("nothing", None),
        ("\\boxed{073}", 73),
        ("\\boxed{\\textbf{(073)}}", 73),
        ("\\boxed{$m + n = 1,024 \\text{ points}$.}", 1024),
        ("\\boxed{\\boxed{73^\\circ}}", 73),
        ("\\boxed{x = 1}, and cut short: \\boxed{\\frac{1}{2", 1),
        ("\\boxed{-5}", None),
        ("\\boxed{n = -\\text{5}}", None),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{\\sqrt{\\frac{\\sqrt{3}}{2}}}", None),
        ("\\boxed{1/2}", None),
        ("\\boxed{2^{10}}", None),
        ("\\boxed{5\\pi}", None),
        ("\\boxed{5x}", None),
        ("\\boxed{.5}", None),
        ("\\boxed{x >= 5}", None),
        ("\\boxed{3 or 5}", None),
        ("it is -5", None),
        ("it is \\frac{1}{2} or 1/2", None),
        ("10-5", 5),
    ],
)
def test_the_number_is_extracted_from_an_answer(text: str, number: int | None) -> None:
    assert final_number(text) == number


def test_both_published_spellings_of_aime_are_read() -> None:
    for entry in (
        {"id": 60, "problem": "p", "answer": "025"},
        {"ID": "2024-I-1", "Problem": "p", "Answer": 25},
    ):
        question = Aime24().question(entry)
        assert question.prompt.startswith("p\n\n")
        assert [question.score(text) for text in ("\\boxed{25}", "025", "26")] == [1, 1, 0]


def test_a_json_list_and_json_lines_give_the_same_questions(tmp_path: Path) -> None:
    path = tmp_path / "data"
    rows = [LONG | {"_id": str(number), "context": "line\u2028separator"} for number in range(3)]
    path.write_text(json.dumps(rows))
    assert [question.id for question in read_questions(LongBenchV2(), path, None)] == ["0", "1", "2"]
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows))
    assert [question.id for question in read_questions(LongBenchV2(), path, 2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("", "has no entries"),
        (json.dumps([LONG, {}]), "entry 2, is no question of longbench-v2: no 'answer'"),
        (json.dumps([LONG | {"answer": "E"}]), "answer must be A, B, C or D, got 'E'"),
        (json.dumps([LONG | {"context": 5}]), "context must be text, got 5"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_missing_file_is_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text(text)
    with pytest.raises(OptionError, match=message):
        read_questions(LongBenchV2(), tmp_path / "data", None)


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)
@pytest.mark.parametrize("entry", [5, None, "answer", ["answer"]])
def test_an_entry_that_is_no_object_is_reported(benchmark: Benchmark, entry: object, tmp_path: Path) -> None:
    (tmp_path / "data").write_text(json.dumps([entry]))
    with pytest.raises(
        OptionError,
        match=f"entry 1, is no question of {benchmark.name}: an entry must be a JSON object, got ",
    ):
        read_questions(benchmark, tmp_path / "data", None)

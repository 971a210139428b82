"""LiveCodeBench: its file, its programs and what counts as right."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from server.eval.benchmarks.livecodebench import LiveCodeBench, is_same_output, last_program, private_tests

HIDDEN = [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}]


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def row(**changes: Any) -> dict[str, Any]:
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    fields = {"question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "abc_a"}
    fields |= {"contest_id": "abc", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}"}
    return fields | {"public_test_cases": json.dumps(public), "private_test_cases": packed(json.dumps(HIDDEN))} | changes


def answer(program: str) -> str:
    return f"Some words.\n```python\n{program}\n```\nDone."


def test_a_program_must_pass_the_hidden_tests_too() -> None:
    question = LiveCodeBench().question(row())
    assert question.score(answer("print(sum(map(int, input().split())))")) == 1
    assert question.score(answer("print(3)")) == 0
    assert question.score(answer("raise SystemError")) == 0
    assert question.score("print(3)") == 0  # no fences
    assert (question.id, question.groups) == ("abc_a", ("easy",))
    assert "Read the inputs from stdin" in question.prompt


def test_functions_are_called() -> None:
    tests = json.dumps([{"input": '[1, 2]\n"a"', "output": '["a", 2, 1]', "testtype": "functional"}])
    starter = "class Solution:\n    def mix(self, xs: List[int], s: str) -> list:\n        "
    changes = {"metadata": '{"func_name": "mix"}', "starter_code": starter, "public_test_cases": tests, "private_test_cases": "[]"}
    question = LiveCodeBench().question(row(**changes))
    assert question.score(answer(f"{starter}return (s, *reversed(xs))")) == 1  # a tuple is as good as a list
    assert question.score(answer(f"{starter}return [s]")) == 0
    assert question.score(answer(f"{starter}print('[\"a\", 2, 1]')")) == 0
    assert f"```python\n{starter}\n```" in question.prompt


def test_the_last_program_counts() -> None:
    assert last_program("```\na\n```\nno:\n```python\nb\nc\n```") == "b\nc"
    assert last_program("```\na") == ""


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1.50", "1.5", True),
        ("50000000000000001", "50000000000000000", False),
        ("Yes", "yes", False),
        ("1\n2", "1", False),
        ("nan x", "nan y", False),
    ],
)
def test_outputs(given: str, expected: str, is_same: bool) -> None:
    assert is_same_output(given, expected) is is_same


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("a pickle ran",))


@pytest.mark.parametrize("protocol", range(1, 6))
def test_private_tests_of_every_pickle_protocol(protocol: int) -> None:
    pickled = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(HIDDEN), protocol))).decode()
    assert private_tests(pickled) == HIDDEN
    assert private_tests(json.dumps(HIDDEN)) == HIDDEN


def test_a_pickle_is_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a pickle that would do STACK_GLOBAL"):
        private_tests(packed(Dangerous()))
    with pytest.raises(ValueError, match="a pickle that would do EMPTY_LIST"):
        private_tests(packed(HIDDEN))
    with pytest.raises(ValueError, match="neither JSON nor compressed base64"):
        private_tests("what?")
    with pytest.raises(ValueError, match="cut short"):
        private_tests(base64.b64encode(zlib.compress(b"x" * 1000)[:-6]).decode())
    assert capsys.readouterr().out == ""

"""LiveCodeBench: its file, its programs and what counts as right."""

import base64
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from commands.eval.benchmarks.benchmark import read_questions
from commands.eval.benchmarks.livecodebench import LiveCodeBench, is_same_output, last_program, private_tests
from server.options.command_line import OptionError

HIDDEN = [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}]
DEEP = "[" * 100_000


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def row(**changes: Any) -> dict[str, Any]:
    public = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    fields = {
        "question_title": "Sum",
        "question_content": "Add two numbers.",
        "platform": "atcoder",
        "question_id": "abc_a",
    }
    fields |= {
        "contest_id": "abc",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "metadata": "{}",
    }
    return (
        fields
        | {"public_test_cases": json.dumps(public), "private_test_cases": packed(json.dumps(HIDDEN))}
        | changes
    )


def answer(program: str) -> str:
    return f"Some words.\n```python\n{program}\n```\nDone."


def message_of(changes: dict[str, str], folder: Path) -> str:
    (folder / "data").write_text(json.dumps([row(), row(**changes)]))
    with pytest.raises(OptionError) as raised:
        read_questions(LiveCodeBench(), folder / "data", None)
    return str(raised.value)


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
    changes = {
        "metadata": '{"func_name": "mix"}',
        "starter_code": starter,
        "public_test_cases": tests,
        "private_test_cases": "[]",
    }
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
def test_outputs_are_compared(given: str, expected: str, is_same: bool) -> None:
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
    with pytest.raises(ValueError, match="is a pickle with opcode STACK_GLOBAL"):
        private_tests(packed(Dangerous()))
    with pytest.raises(ValueError, match="is a pickle with opcode EMPTY_LIST"):
        private_tests(packed(HIDDEN))
    with pytest.raises(ValueError, match="neither JSON nor compressed base64"):
        private_tests("what?")
    with pytest.raises(ValueError, match="cut short"):
        private_tests(base64.b64encode(zlib.compress(b"x" * 1000)[:-6]).decode())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": "null"}, "metadata must be a JSON object, got None"),
        ({"metadata": "[]"}, "metadata must be a JSON object"),
        ({"metadata": "5"}, "metadata must be a JSON object"),
        ({"metadata": "{"}, "Expecting property name"),
        ({"metadata": DEEP}, "maximum recursion depth"),
        ({"metadata": '{"func_name": 5}'}, "func_name must be a name, got 5"),
        ({"metadata": '{"func_name": ["f"]}'}, "func_name must be a name"),
        ({"metadata": '{"func_name": ""}'}, "func_name must be a name"),
        ({"metadata": '{"func_name": "f\\u0000"}'}, "func_name must be a name"),
        ({"metadata": '{"func_name": "\\ud800"}'}, "func_name must be a name"),
        ({"private_test_cases": "what?"}, "neither JSON nor compressed base64"),
        ({"private_test_cases": "é"}, "neither JSON nor compressed base64"),
        (
            {"private_test_cases": base64.b64encode(zlib.compress(b"\x80\x04X\xff")).decode()},
            "not enough data",
        ),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"\xff")).decode()}, "opcode b'.xff' unknown"),
        ({"private_test_cases": packed("no JSON")}, "Expecting value"),
    ],
)
def test_an_entry_that_is_no_question_is_reported(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    assert message_of(changes, tmp_path).startswith(
        f"--data {tmp_path / 'data'}, entry 2, is no question of livecodebench: "
    )
    assert re.search(message, message_of(changes, tmp_path))


@pytest.mark.parametrize("name", ["public_test_cases", "private_test_cases"])
@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("{}", "{name} must be a JSON list, got {{}}"),
        ("5", "{name} must be a JSON list, got 5"),
        ("null", "{name} must be a JSON list, got None"),
        ('["input"]', "a test of {name} must be a JSON object, got 'input'"),
        ("[[]]", "a test of {name} must be a JSON object"),
        ('[{"input": "1"}]', "no 'output'"),
        ('[{"input": 1, "output": "1"}]', "input must be text, got 1"),
        ('[{"input": "1", "output": ["1"]}]', "output must be text"),
        (DEEP, "maximum recursion depth"),
    ],
)
def test_malformed_tests_are_reported(name: str, tests: str, message: str, tmp_path: Path) -> None:
    assert message.format(name=name) in message_of({name: tests}, tmp_path)
    if name == "private_test_cases":
        assert message.format(name=name) in message_of({name: packed(tests)}, tmp_path)


@pytest.mark.parametrize(
    "program",
    ["print(1)\0", "print('\ud800')", "\ud800", "import sys\nsys.stdout.buffer.write(b'\\xff')", ""],
)
def test_no_text_of_an_answer_is_an_error(program: str) -> None:
    assert LiveCodeBench().question(row()).score(answer(program)) == 0


def test_a_value_nested_too_deep_is_wrong() -> None:
    tests = json.dumps([{"input": "1", "output": "[]", "testtype": "functional"}])
    changes = {"metadata": '{"func_name": "nest"}', "public_test_cases": tests, "private_test_cases": "[]"}
    program = (
        "def nest(a):\n    value = []\n    for _ in range(5000):\n        value = [value]\n    return value"
    )
    assert LiveCodeBench().question(row(**changes)).score(answer(program)) == 0

"""LiveCodeBench (arXiv 2403.07974), code generation: programs that must pass every test of a contest's problem.

The prompt, the reading of programs and what counts as the same output are its authors' (github.com/LiveCodeBench/LiveCodeBench).
"""

import base64
import json
import pickletools
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial

from commands.eval.benchmarks.benchmark import Question, Row, fields, words
from commands.eval.benchmarks.sandbox import Sandbox

_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python program "
    "that matches the specification and passes all tests. You will NOT return anything except for the program."
)
_WITH_STARTER = "You will use the following starter code to write the solution to the problem and enclose your code within delimiters."
_WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample inputs). "
    "Enclose your code within delimiters as follows."
)
_MAX_TESTS_BYTES = 1 << 30  # unpacked
_TEXT_OPCODES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_IDLE_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})


@dataclass(frozen=True, slots=True)
class Test:
    """What goes in, and what must come out: text of the standard streams, or JSON, an argument a line."""

    given: str
    expected: str


class LiveCodeBench:
    name = "livecodebench"
    length = 8192
    max_tokens = 2000

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox()

    def question(self, row: Row) -> Question:
        function = fields(json.loads(words(row, "metadata") or "{}"), "metadata").get("func_name")
        if function is not None and not (isinstance(function, str) and function.isidentifier()):
            raise ValueError(f"func_name must be a name, got {function!r:.80}")
        tests = [Test(words(test, "input"), words(test, "output")) for test in _tests(row)]
        if not tests:
            raise ValueError("it has no tests")
        return Question(
            words(row, "question_id"),
            _prompt(words(row, "question_content"), words(row, "starter_code")),
            "",
            (words(row, "difficulty"),),
            partial(self._score, function, tests),
            _SYSTEM,
        )

    def _score(self, function: str | None, tests: Sequence[Test], text: str) -> float:
        program = last_program(text)
        try:
            return float(bool(program) and all(self._passes(program, function, test) for test in tests))
        except (
            RecursionError
        ):  # what it returned, or the folders that it made, are nested too deep to be read or removed
            return 0.0

    def _passes(self, program: str, function: str | None, test: Test) -> bool:
        outcome = self._sandbox.run(program, test.given, function)
        if not outcome.is_done:
            return False
        if function is None:
            return is_same_output(outcome.output, test.expected)
        return is_same_value(outcome.output, test.expected)


def last_program(text: str) -> str:
    """Return what stands between the last two lines with a fence; nothing where there are fewer."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def is_same_output(given: str, expected: str) -> bool:
    """Return whether two outputs have the same lines, white space around them aside; numbers are compared as numbers."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (given, expected))
    return len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted))


def is_same_value(given: str, expected: str) -> bool:
    try:
        return bool(json.loads(given) == json.loads(expected))
    except ValueError:
        return False


def private_tests(text: str) -> list[Row]:
    """Read tests that are JSON, or JSON in a pickle that is compressed and in base64.

    A pickle is a program. This one is only looked at, never run: it must hold one text and nothing else. Raises `ValueError`,
    and `RecursionError` for JSON that is nested too deep.
    """
    with suppress(json.JSONDecodeError):
        return _read(text, "private_test_cases")
    try:
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_TESTS_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"private_test_cases is neither JSON nor compressed base64: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"private_test_cases is cut short, or larger than {_MAX_TESTS_BYTES} bytes")
    return _read(_only_text(pickled), "private_test_cases")


def _only_text(pickled: bytes) -> str:
    texts = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXT_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in _IDLE_OPCODES:
            raise ValueError(
                f"private_test_cases is a pickle that would do {opcode.name}: only one that holds a text is read"
            )
    if len(texts) != 1:
        raise ValueError(f"private_test_cases is a pickle of {len(texts)} texts: it must hold one")
    return texts[0]


def _tests(row: Row) -> list[Row]:
    return _read(words(row, "public_test_cases"), "public_test_cases") + private_tests(
        words(row, "private_test_cases")
    )


def _read(text: str, name: str) -> list[Row]:
    tests = json.loads(text)
    if not isinstance(tests, list):
        raise ValueError(f"{name} must be a JSON list, got {tests!r:.80}")
    return [fields(test, f"a test of {name}") for test in tests]


def _prompt(content: str, starter_code: str) -> str:
    form, code = (_WITH_STARTER, starter_code) if starter_code else (_WITHOUT_STARTER, "# YOUR CODE HERE")
    return (
        f"### Question:\n{content}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )


def _is_same_line(line: str, wanted: str) -> bool:
    try:
        return line == wanted or [Decimal(word) for word in line.split()] == [
            Decimal(word) for word in wanted.split()
        ]
    except InvalidOperation:
        return False

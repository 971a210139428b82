"""LiveCodeBench (arXiv 2403.07974), code generation: programs must pass every test of a contest's problem.

The prompt, the extraction of programs and the comparison of outputs follow the authors' code
(github.com/LiveCodeBench/LiveCodeBench).
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

from commands.eval.benchmarks.benchmark import Question, Row, fields, text_field
from commands.eval.benchmarks.sandbox import Sandbox

_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program."
)
_WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem "
    "and enclose your code within delimiters."
)
_WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout "
    "(do not directly test on the sample inputs). Enclose your code within delimiters as follows."
)
_MAX_TESTS_BYTES = 1 << 30  # decompressed
_TEXT_OPCODES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_NEUTRAL_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"})


@dataclass(frozen=True, slots=True)
class Test:
    """An input and its expected output.

    For a program they are the texts of standard input and output. For a function they are JSON: one argument
    on each line, and the value returned.
    """

    input: str
    expected: str


class LiveCodeBench:
    name = "livecodebench"
    length = 8192
    max_tokens = 2000

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox()

    def question(self, row: Row) -> Question:
        function = fields(json.loads(text_field(row, "metadata") or "{}"), "metadata").get("func_name")
        if function is not None and not (isinstance(function, str) and function.isidentifier()):
            raise ValueError(f"func_name must be a name, got {function!r:.80}")
        tests = [Test(text_field(test, "input"), text_field(test, "output")) for test in _tests(row)]
        if not tests:
            raise ValueError("it has no tests")
        return Question(
            text_field(row, "question_id"),
            _prompt(text_field(row, "question_content"), text_field(row, "starter_code")),
            "",
            (text_field(row, "difficulty"),),
            partial(self._score, function, tests),
            _SYSTEM,
        )

    def _score(self, function: str | None, tests: Sequence[Test], text: str) -> float:
        program = last_program(text)
        try:
            return float(bool(program) and all(self._passes(program, function, test) for test in tests))
        except RecursionError:
            # The returned value, or the folders that the program made, are nested too deep to read or remove.
            return 0.0

    def _passes(self, program: str, function: str | None, test: Test) -> bool:
        outcome = self._sandbox.run(program, test.input, function)
        if not outcome.is_done:
            return False
        if function is None:
            return is_same_output(outcome.output, test.expected)
        return is_same_value(outcome.output, test.expected)


def last_program(text: str) -> str:
    """Return the lines between the last two code fences, or an empty text if there are fewer than two."""
    lines = text.split("\n")
    fences = [index for index, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def is_same_output(output: str, expected: str) -> bool:
    """Return whether two outputs have equal lines, without surrounding white space.

    Numbers compare by value.
    """
    lines = _stripped_lines(output)
    expected_lines = _stripped_lines(expected)
    return len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def is_same_value(value: str, expected: str) -> bool:
    """Return whether two JSON texts have equal values. Invalid JSON equals nothing."""
    try:
        return bool(json.loads(value) == json.loads(expected))
    except ValueError:
        return False


def private_tests(text: str) -> list[Row]:
    """Read tests that are JSON, or JSON in a pickle that is compressed and encoded in base64.

    A pickle is a program. This one is parsed and never run: it must contain one text and nothing else. Raises
    `ValueError`, or `RecursionError` for JSON that is nested too deep.
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
        elif opcode.name not in _NEUTRAL_OPCODES:
            raise ValueError(
                f"private_test_cases is a pickle with opcode {opcode.name}; it must contain one text only"
            )
    if len(texts) != 1:
        raise ValueError(f"private_test_cases is a pickle of {len(texts)} texts; it must contain one")
    return texts[0]


def _tests(row: Row) -> list[Row]:
    return _read(text_field(row, "public_test_cases"), "public_test_cases") + private_tests(
        text_field(row, "private_test_cases")
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


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    try:
        return _numbers(line) == _numbers(expected)
    except InvalidOperation:
        return False


def _numbers(line: str) -> list[Decimal]:
    # Decimals, as the authors use: floats would make large integers equal that differ.
    return [Decimal(word) for word in line.split()]

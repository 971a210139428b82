"""A benchmark reads its authors' file into questions, with the authors' prompts and the authors' scoring."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from server.options.command_line import OptionError

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, an optional system message before it, and the groups in which the question is reported.

    `score` returns an answer's score from 0 to 1; it may take seconds and must not raise. `may_be_cut` says
    whether a prompt that is too long loses its middle, as its authors do. Otherwise it is an error.
    """

    id: str
    prompt: str
    answer: str
    groups: tuple[str, ...]
    score: Callable[[str], float]
    system: str = ""
    may_be_cut: bool = False


class Benchmark(Protocol):
    """`length` and `max_tokens` are the defaults of the options of the same names."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    def question(self, row: Row) -> Question:
        """Return the question of one entry of the file.

        Raises `ValueError`, `LookupError` or `RecursionError` for an invalid entry.
        """
        ...


def read_questions(benchmark: Benchmark, path: Path, max_questions: int | None) -> list[Question]:
    """Read the first entries of a file, a JSON list or JSON lines. Raises `OptionError`."""
    try:
        rows = _rows(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deep
        raise OptionError(f"--data {path} cannot be read as JSON or JSON lines: {error}") from error
    if not rows:
        raise OptionError(f"--data {path} has no entries")
    questions = []
    for entry_number, row in enumerate(rows[:max_questions], 1):
        try:
            questions.append(benchmark.question(fields(row, "an entry")))
        except (ValueError, LookupError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise OptionError(
                f"--data {path}, entry {entry_number}, is no question of {benchmark.name}: {reason}"
            ) from error
    return questions


def _rows(text: str) -> Sequence[object]:
    if text.lstrip().startswith("["):
        rows: list[object] = json.loads(text)
        return rows
    # Not `splitlines`: JSON strings may contain U+2028, which it takes for the end of a line.
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def fields(value: object, what: str) -> Row:
    """Return a parsed JSON value that must be an object. Raises `ValueError` otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {value!r:.80}")
    return value


def text_field(row: Row, *names: str) -> str:
    """Return the text of the first of these fields that the entry has.

    Raises `KeyError` if it has none, `ValueError` if the field is no text.
    """
    value = next((row[name] for name in names if name in row), None)
    if value is None:
        raise KeyError(names[0])
    if not isinstance(value, str):
        raise ValueError(f"{names[0]} must be text, got {value!r:.80}")
    return value

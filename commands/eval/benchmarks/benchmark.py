"""What a benchmark makes of its file: questions as their authors ask them, each with what an answer is worth."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from server.options.command_line import OptionError

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the system's message before it (empty: none), and the groups whose own scores are told.

    `score` gives an answer's worth from 0 to 1; it may take seconds and must not raise. `may_be_cut` says whether the middle of a prompt
    that is too long is left out, as its authors do, or the question cannot be asked.
    """

    id: str
    prompt: str
    answer: str
    groups: tuple[str, ...]
    score: Callable[[str], float]
    system: str = ""
    may_be_cut: bool = False


class Benchmark(Protocol):
    """`length` and `max_tokens` are what it is asked with unless told otherwise."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    def question(self, row: Row) -> Question:
        """Return the question of one entry of the file. Raises `ValueError`, `LookupError` or `RecursionError` for one that is none."""
        ...


def read_questions(benchmark: Benchmark, path: Path, most: int | None) -> list[Question]:
    """Read the first `most` entries of a file, a JSON list or JSON lines. Raises `OptionError`."""
    try:
        rows = _rows(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # JSON that is nested too deep is the last
        raise OptionError(f"--data {path} cannot be read as JSON or JSON lines: {error}") from error
    if not rows:
        raise OptionError(f"--data {path} has no entries")
    questions = []
    for number, row in enumerate(rows[:most]):
        try:
            questions.append(benchmark.question(fields(row, "an entry")))
        except (ValueError, LookupError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise OptionError(
                f"--data {path}, entry {number + 1}, is no question of {benchmark.name}: {what}"
            ) from error
    return questions


def _rows(text: str) -> Sequence[object]:
    if text.lstrip().startswith("["):
        rows: list[object] = json.loads(text)
        return rows
    return [
        json.loads(line) for line in text.split("\n") if line.strip()
    ]  # not splitlines: JSON strings may hold U+2028


def fields(value: object, what: str) -> Row:
    """Return what JSON held, if it is an object. Raises `ValueError`."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {value!r:.80}")
    return value


def words(row: Row, *names: str) -> str:
    """Return the text of the first of these fields that an entry has. Raises `KeyError` or `ValueError`."""
    value = next((row[name] for name in names if name in row), None)
    if value is None:
        raise KeyError(names[0])
    if not isinstance(value, str):
        raise ValueError(f"{names[0]} must be text, got {value!r:.80}")
    return value

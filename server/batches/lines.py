"""The lines of a batch's input: checked before any of them is run, then read one by one where they lie."""

import json
from array import array
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from server.batches.batch import LineError

MAX_ERRORS: Final = 100  # that are told
MAX_CUSTOM_ID: Final = 512  # characters


@dataclass(frozen=True, slots=True)
class Task:
    """A line that may be run."""

    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Inspection:
    """What a look at the input brought: where the lines lie that have no answer yet, or what is wrong."""

    unanswered: "array[int]" = field(default_factory=lambda: array("Q"))  # where each begins, in bytes
    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


class _WrongLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(_plain(message))
        self.code, self.param = code, None if param is None else _plain(param)


def inspect_input(
    path: Path, endpoint: str, max_lines: int, max_line_bytes: int, answered: Set[str]
) -> Inspection:
    """Look at every line. Takes its time; one line at a time is in memory, and of the others their ids."""
    found, seen, models = Inspection(), set[str](), set[str | None]()
    for number, (start, line) in enumerate(_lines(path, max_line_bytes), start=1):
        if not line and number <= 2 * max_lines:
            continue
        if found.num_lines == max_lines or number > 2 * max_lines:
            found.errors = [LineError("too_many_tasks", f"A batch may have at most {max_lines} lines.")]
            return found
        try:
            task = _task(line, endpoint, max_line_bytes)
            if task.custom_id in seen:
                raise _WrongLineError(
                    "duplicate_custom_id",
                    f"The custom_id '{task.custom_id}' is that of a line before.",
                    "custom_id",
                )
            model = task.body.get("model")
            if model not in (models or {model}):
                raise _WrongLineError(
                    "mismatched_model", "All lines of a batch must have the same model.", "body.model"
                )
        except _WrongLineError as error:
            if len(found.errors) < MAX_ERRORS:
                found.errors.append(LineError(error.code, str(error), number, error.param))
            continue
        seen.add(task.custom_id)
        models.add(model)
        found.num_lines += 1
        if task.custom_id not in answered:
            found.unanswered.append(start)
    if not found.num_lines and not found.errors:
        found.errors = [LineError("empty_file", "The input file has no lines.")]
    model = next(iter(models), None)
    found.model = None if model is None else _plain(model[:256])
    return found


def read_task(path: Path, start: int) -> Task:
    """Return a line that was found to be right."""
    with path.open("rb") as file:
        file.seek(start)
        line = json.loads(file.readline())
    return Task(line["custom_id"], line["body"])


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield where each line begins and the line without its end, cut off where it is too long."""
    start = 0
    with path.open("rb") as file:
        while line := file.readline(max_line_bytes + 2):
            place = start, line.rstrip(b"\r\n")
            start += len(line)
            while not line.endswith(b"\n") and (line := file.readline(max_line_bytes)):
                start += len(line)
            yield place


def _plain(text: str) -> str:
    """Return text that UTF-8 can carry: JSON can say half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def _task(line: bytes, endpoint: str, max_line_bytes: int) -> Task:
    if len(line) > max_line_bytes:
        raise _WrongLineError("line_too_long", f"A line may have at most {max_line_bytes} bytes.")
    try:
        given = json.loads(line)
        json.dumps(given)  # as deep as it may be to be sent on
    except (ValueError, RecursionError) as error:
        raise _WrongLineError("invalid_json_line", "This line is not parseable as valid JSON.") from error
    if not isinstance(given, dict):
        raise _WrongLineError("invalid_json_line", "This line is not a JSON object.")
    _check_envelope(given, endpoint)
    return Task(given["custom_id"], given["body"])


def _check_envelope(given: dict[str, Any], endpoint: str) -> None:
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in given:
            raise _WrongLineError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name
            )
        if not isinstance(given[name], kind):
            raise _WrongLineError(
                "invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}.", name
            )
    unknown = next((name for name in given if name not in ("custom_id", "method", "url", "body")), None)
    if unknown is not None:
        raise _WrongLineError("unknown_parameter", f"Unknown parameter: '{unknown[:128]}'.", unknown[:128])
    if not 0 < len(given["custom_id"]) <= MAX_CUSTOM_ID:
        raise _WrongLineError(
            "invalid_custom_id", f"'custom_id' must have from 1 to {MAX_CUSTOM_ID} characters.", "custom_id"
        )
    if given["method"] != "POST":
        raise _WrongLineError("invalid_method", "'method' must be 'POST'.", "method")
    if given["url"] != endpoint:
        raise _WrongLineError("mismatched_url", f"'url' must be the batch's endpoint, '{endpoint}'.", "url")
    for name in ("stream", "background"):  # what is answered before it is done has no place in a file
        if given["body"].get(name):
            raise _WrongLineError(
                "unsupported_parameter", f"'{name}' is not supported in batches.", f"body.{name}"
            )
    if not isinstance(given["body"].get("model"), str | None):
        raise _WrongLineError("invalid_type", "'model' must be a string.", "body.model")

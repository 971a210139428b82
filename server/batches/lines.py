"""The lines of a batch's input: all are checked before the first runs, and each is read again to run."""

import json
from array import array
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from server.batches.batch import LineError

MAX_ERRORS: Final = 100  # reported errors of one input
MAX_CUSTOM_ID: Final = 512  # characters


@dataclass(frozen=True, slots=True)
class Task:
    """A valid line of the input."""

    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Inspection:
    """The result of a check of the input: the positions of its unanswered lines, or its errors."""

    # The start of each unanswered line, in bytes. An array, since a list takes several times its memory.
    unanswered: "array[int]" = field(default_factory=lambda: array("Q"))
    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


class _InvalidLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(_encodable(message))
        self.code = code
        self.param = None if param is None else _encodable(param)


def inspect_input(
    path: Path, endpoint: str, max_lines: int, max_line_bytes: int, answered: Set[str]
) -> Inspection:
    """Check every line of the input for a batch to `endpoint`.

    `answered` are the custom ids of the lines that have an answer. Blocks for long inputs. Memory holds one
    line at a time, and the custom ids of all lines.
    """
    found = Inspection()
    seen = set[str]()
    models = set[str | None]()
    for line_number, (start, line) in enumerate(_lines(path, max_line_bytes), start=1):
        # Empty lines are skipped. The bound on them limits the time for an input of newlines only.
        if not line and line_number <= 2 * max_lines:
            continue
        if found.num_lines == max_lines or line_number > 2 * max_lines:
            found.errors = [LineError("too_many_tasks", f"A batch may have at most {max_lines} lines.")]
            return found
        try:
            task = _task(line, endpoint, max_line_bytes)
            if task.custom_id in seen:
                raise _InvalidLineError(
                    "duplicate_custom_id",
                    f"The custom_id '{task.custom_id}' is used by an earlier line.",
                    "custom_id",
                )
            model = task.body.get("model")
            if model not in (models or {model}):
                raise _InvalidLineError(
                    "mismatched_model", "All lines of a batch must have the same model.", "body.model"
                )
        except _InvalidLineError as error:
            if len(found.errors) < MAX_ERRORS:
                found.errors.append(LineError(error.code, str(error), line_number, error.param))
            continue
        seen.add(task.custom_id)
        models.add(model)
        found.num_lines += 1
        if task.custom_id not in answered:
            found.unanswered.append(start)
    if not found.num_lines and not found.errors:
        found.errors = [LineError("empty_file", "The input file has no lines.")]
    model = next(iter(models), None)
    found.model = None if model is None else _encodable(model[:256])
    return found


def read_task(path: Path, start: int) -> Task:
    """Return the line at byte `start`, which `inspect_input` has accepted."""
    with path.open("rb") as file:
        file.seek(start)
        line = json.loads(file.readline())
    return Task(line["custom_id"], line["body"])


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line's start in bytes and the line without its newline.

    Of a line that is too long, just over `max_line_bytes` bytes are returned, so that callers can detect it.
    """
    start = 0
    with path.open("rb") as file:
        while line := file.readline(max_line_bytes + 2):
            line_start = start
            content = line.rstrip(b"\r\n")
            start += len(line)
            # Skip the rest of a line that is too long.
            while not line.endswith(b"\n") and (line := file.readline(max_line_bytes)):
                start += len(line)
            yield line_start, content


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates escaped: JSON can contain them, UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _task(line: bytes, endpoint: str, max_line_bytes: int) -> Task:
    if len(line) > max_line_bytes:
        raise _InvalidLineError("line_too_long", f"A line may have at most {max_line_bytes} bytes.")
    try:
        record = json.loads(line)
        # The dispatcher encodes the body again, and the encoder's limit on nesting may be lower.
        json.dumps(record)
    except (ValueError, RecursionError) as error:
        raise _InvalidLineError("invalid_json_line", "This line is not parseable as valid JSON.") from error
    if not isinstance(record, dict):
        raise _InvalidLineError("invalid_json_line", "This line is not a JSON object.")
    _check_envelope(record, endpoint)
    return Task(record["custom_id"], record["body"])


def _check_envelope(record: dict[str, Any], endpoint: str) -> None:
    """Check all fields of a line except the body's content, which the endpoint checks."""
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in record:
            raise _InvalidLineError(
                "missing_required_parameter", f"Missing required parameter: '{name}'.", name
            )
        if not isinstance(record[name], kind):
            raise _InvalidLineError(
                "invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}.", name
            )
    unknown = next((name for name in record if name not in ("custom_id", "method", "url", "body")), None)
    if unknown is not None:
        raise _InvalidLineError("unknown_parameter", f"Unknown parameter: '{unknown[:128]}'.", unknown[:128])
    if not 0 < len(record["custom_id"]) <= MAX_CUSTOM_ID:
        num_chars = len(record["custom_id"])
        message = f"'custom_id' must have from 1 to {MAX_CUSTOM_ID} characters, got {num_chars}."
        raise _InvalidLineError("invalid_custom_id", message, "custom_id")
    if record["method"] != "POST":
        message = f"'method' must be 'POST', got {record['method'][:32]!r}."
        raise _InvalidLineError("invalid_method", message, "method")
    if record["url"] != endpoint:
        message = f"'url' must be the batch's endpoint, '{endpoint}', got {record['url'][:128]!r}."
        raise _InvalidLineError("mismatched_url", message, "url")
    # Both return before the whole answer exists, but a line of the output file is a whole answer.
    for name in ("stream", "background"):
        if record["body"].get(name):
            raise _InvalidLineError(
                "unsupported_parameter", f"'{name}' is not supported in batches.", f"body.{name}"
            )
    if not isinstance(record["body"].get("model"), str | None):
        raise _InvalidLineError("invalid_type", "'model' must be a string.", "body.model")

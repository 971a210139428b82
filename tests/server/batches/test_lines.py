"""The input of a batch: each invalid line is reported with its number."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.batches.lines import MAX_ERRORS, Inspection, inspect_input, read_task
from tests.server.batches.inputs import CHAT, jsonl, line


def inspect(
    folder: Path, content: bytes, *, max_lines: int = 100, answered: frozenset[str] = frozenset()
) -> Inspection:
    path = folder / "input"
    path.write_bytes(content)
    return inspect_input(path, CHAT, max_lines, 2000, answered)


def test_lines_are_found_where_they_lie(tmp_path: Path) -> None:
    lines = [line("a"), line("é" * 20), line("\U0001f600", n=2)]
    content = b"\n".join(json.dumps(each, ensure_ascii=False).encode() for each in lines) + b"\r\n\n\n"
    found = inspect(tmp_path, content)
    assert (found.errors, found.num_lines, found.model) == ([], 3, "demo")
    tasks = [read_task(tmp_path / "input", start) for start in found.unanswered]
    assert [(task.custom_id, task.body) for task in tasks] == [
        (each["custom_id"], each["body"]) for each in lines
    ]


def test_answered_lines_are_left_out(tmp_path: Path) -> None:
    found = inspect(tmp_path, jsonl(line(name) for name in "abcd"), answered=frozenset({"b", "d"}))
    assert found.num_lines == 4
    assert [read_task(tmp_path / "input", start).custom_id for start in found.unanswered] == ["a", "c"]


GOOD = line("good")


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        (b"[" * 1900, "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'"' + b"x" * 2100 + b'"', "line_too_long", None),
        (line("good"), "duplicate_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (GOOD | {"custom_id": 3}, "invalid_type", "custom_id"),
        (GOOD | {"method": "GET"}, "invalid_method", "method"),
        (GOOD | {"url": "/v1/completions"}, "mismatched_url", "url"),
        (GOOD | {"body": []}, "invalid_type", "body"),
        (GOOD | {"more": 1}, "unknown_parameter", "more"),
        (GOOD | {"\ud800": 1}, "unknown_parameter", "\\ud800"),
        ({key: GOOD[key] for key in ("custom_id", "method", "url")}, "missing_required_parameter", "body"),
        ({key: GOOD[key] for key in ("body", "method", "url")}, "missing_required_parameter", "custom_id"),
        (line("other", model="another"), "mismatched_model", "body.model"),
        (line("other", model=None), "mismatched_model", "body.model"),
        (line("other", model=3), "invalid_type", "body.model"),
        (line("other", stream=True), "unsupported_parameter", "body.stream"),
        (line("other", background=True), "unsupported_parameter", "body.background"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number(
    tmp_path: Path, wrong: Any, code: str, param: str | None
) -> None:
    second = wrong + b"\n" if isinstance(wrong, bytes) else jsonl([wrong])
    found = inspect(tmp_path, jsonl([GOOD]) + second + jsonl([line("last")]))
    [error] = found.errors
    assert (error.code, error.line, error.param) == (code, 2, param)
    error.message.encode()


def test_wrong_lines_are_reported_up_to_a_limit(tmp_path: Path) -> None:
    found = inspect(tmp_path, b"x\n" * (2 * MAX_ERRORS), max_lines=4 * MAX_ERRORS)
    assert [error.line for error in found.errors] == list(range(1, MAX_ERRORS + 1))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (jsonl(line(str(n)) for n in range(4)), "too_many_tasks"),
        (b"\n" * 99, "too_many_tasks"),
    ],
)
def test_inputs_of_no_lines_and_of_too_many(tmp_path: Path, content: bytes, code: str) -> None:
    [error] = inspect(tmp_path, content, max_lines=3).errors
    assert (error.code, error.line) == (code, None)

"""The answers of one batch, on the disk before anything else learns of them: two files that only grow, one line an answer.

They become the batch's output and error file as they are. A line that a crash tore is cut off, and so is its answer: it is asked for again.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from server.batches.batch import Usage
from server.batches.disk import private, sync_folder


class Journal:
    """Used in the disk's thread, except for its counts and usage."""

    def __init__(self, folder: Path) -> None:
        """Take up what is there, mending its end."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.output_path, self.error_path = folder / "output.jsonl", folder / "error.jsonl"
        self.usage = Usage()
        self.num_completed, self.num_failed = (
            self._mend(path) for path in (self.output_path, self.error_path)
        )
        sync_folder(folder)

    def custom_ids(self) -> set[str]:
        """Return the ids of the lines that have an answer."""
        return {
            answer["custom_id"]
            for path in (self.output_path, self.error_path)
            for answer, _ in _whole_lines(path)
        }

    def append(self, answers: Iterable[bytes], *, is_error: bool) -> None:
        """Add answers, a line each without its end, and return when they are on the disk. On an error, nothing was added."""
        lines = [answer + b"\n" for answer in answers]
        path = self.error_path if is_error else self.output_path
        _append(path, b"".join(lines))
        self.usage = sum((Usage.of(json.loads(line)) for line in lines), self.usage)
        if is_error:
            self.num_failed += len(lines)
        else:
            self.num_completed += len(lines)

    def _mend(self, path: Path) -> int:
        """Cut off what is no whole line, and return how many lines there are."""
        num_lines = end = 0
        with open(path, "ab", opener=private):
            pass
        for answer, end in _whole_lines(path):  # noqa: B007 (the last end is used)
            num_lines += 1
            self.usage += Usage.of(answer)
        os.truncate(path, end)
        return num_lines


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab", buffering=0, opener=private) as file:
        start = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(start)
            raise


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each line and where it ends, up to the first that is torn."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            try:
                answer = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                answer = None
            if not isinstance(answer, dict) or "custom_id" not in answer:
                return
            yield answer, end

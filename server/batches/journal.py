"""The answers of one batch in two append-only files, with one line for each answer.

An answer is on the disk before the counts or metrics include it. The two files later become the batch's
output and error file unchanged. A line that a crash left incomplete is cut off, and its request runs again.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from server.batches.batch import Usage
from server.batches.disk import private, sync_folder

JOURNAL_FILES: Final = ("output.jsonl", "error.jsonl")


class Journal:
    """The journal in `folder`. Its methods run in the disk's thread; other threads may read its counts."""

    def __init__(self, folder: Path) -> None:
        """Open or create the two files, and cut off an incomplete last line."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.output_path, self.error_path = (folder / name for name in JOURNAL_FILES)
        self.usage = Usage()
        self.num_bytes = 0
        self.num_completed = self._repair(self.output_path)
        self.num_failed = self._repair(self.error_path)
        sync_folder(folder)

    def custom_ids(self) -> set[str]:
        """Return the custom ids of the answered lines."""
        return {
            answer["custom_id"]
            for path in (self.output_path, self.error_path)
            for answer, _ in _complete_lines(path)
        }

    def append(self, answers: Iterable[bytes], *, is_error: bool) -> None:
        """Append answers, each a JSON line without its newline, and sync them to the disk.

        Raises `OSError`; then none of the answers was added.
        """
        lines = [answer + b"\n" for answer in answers]
        path = self.error_path if is_error else self.output_path
        content = b"".join(lines)
        _append(path, content)
        self.num_bytes += len(content)
        self.usage = sum((Usage.of(json.loads(line)) for line in lines), self.usage)
        if is_error:
            self.num_failed += len(lines)
        else:
            self.num_completed += len(lines)

    def _repair(self, path: Path) -> int:
        """Create `path` if it is missing, truncate it after the last complete line, and return its number of
        lines. Adds the lines' bytes and usage.
        """
        num_lines = 0
        end = 0
        with open(path, "ab", opener=private):
            pass
        for answer, end in _complete_lines(path):  # noqa: B007 (the last end is used)
            num_lines += 1
            self.usage += Usage.of(answer)
        os.truncate(path, end)
        self.num_bytes += end
        return num_lines


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab", buffering=0, opener=private) as file:
        start = file.tell()
        try:
            # An unbuffered write may be short, as on a disk that is nearly full.
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(start)
            raise


def _complete_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each line and its end in bytes, up to the first incomplete one."""
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

"""The limits of files and batches that no option sets, over all keys together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_uploads: int = 8  # at once
    max_lines: int = 50_000  # of one batch
    max_line_bytes: int = 4 * 1024 * 1024
    max_unfinished: int = 32
    max_batches: int = 1000  # above it, the oldest ended batches are deleted, without their files

"""Files that several processes read and write."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one piece: no process sees a part of it. Raises OSError, and then leaves no part."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise

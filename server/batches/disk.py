"""A folder that one process has to itself, and the thread that writes there. What was written is there after a crash, whole or not at all.

It knows bytes and paths of the server's own making, and nothing of what they mean.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class FolderError(ValueError):
    """The folder cannot be had; the message begins with the name of the setting that gave it."""


class Disk:
    """Work given to `run` is done in the order in which it is given."""

    def __init__(self, root: Path) -> None:
        """Take the folder, and make it where it is missing. Raises `FolderError`."""
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FolderError(f"batch_dir {root} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise FolderError(f"batch_dir {root} is in use by another server") from error
        self._thread = ThreadPoolExecutor(1, "batch-disk")

    def folder(self, name: str) -> Path:
        """Return a folder within this one, made where it is missing."""
        path = self.root / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    async def run(self, work: Callable[[*Args], T], *arguments: *Args) -> T:
        """Return what `work` does in the writing thread. It is done to its end even when the one who waits for it is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """Finish what is to be written, and let others have the folder."""
        self._thread.shutdown()
        os.close(self._lock)


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file; whatever happens, it has its old content or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    move(draft, path)


def move(source: Path, target: Path) -> None:
    """Rename a file whose content is on the disk, replacing what is there."""
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Open a file that nobody but this user may read: prompts and answers are in it."""
    return os.open(path, flags, 0o600)

"""A folder that one process locks, and the thread that writes there.

After a crash, a file has its complete new content or its old content. This module handles bytes and paths
chosen by the server. It knows no formats.
"""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class FolderError(ValueError):
    """The folder cannot be used; the message begins with the name of its setting."""


class DiskFullError(Exception):
    """There is no room on the disk, or the user's share of it is used up."""


class Disk:
    """A locked folder and one writing thread, which runs the work passed to `run` in call order."""

    def __init__(self, root: Path) -> None:
        """Lock the folder, and create it if it is missing. Raises `FolderError`."""
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
        """Return the subfolder `name`; create it if it is missing."""
        path = self.root / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    async def run(self, work: Callable[[*Args], T], *arguments: *Args) -> T:
        """Run `work` in the writing thread and return its result. Work that has started also completes when
        the caller is cancelled. Raises `DiskFullError`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(str(error)) from error

    def close(self) -> None:
        """Wait for pending writes and unlock the folder."""
        self._thread.shutdown()
        os.close(self._lock)


def write_atomically(path: Path, content: bytes) -> None:
    """Write or replace a file atomically: after a crash it has its old content or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    move(draft, path)


def move(source: Path, target: Path) -> None:
    """Rename a file whose content is on the disk, replacing `target`."""
    os.replace(source, target)
    # A rename survives a power failure only when the folders that hold the names are on the disk as well.
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Write a folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Open a file with mode 0600, since it contains prompts and answers. An `opener` for `open`."""
    return os.open(path, flags, 0o600)

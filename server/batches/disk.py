"""A folder that several servers may share, and the thread that writes there.

Two kinds of locks keep the servers apart, and the kernel frees both when a process dies. A transaction locks
the folder for a moment. A server that works on one thing for long, such as a batch or an upload, locks a file
of it.

After a crash, a file has its complete new content or its old content. This module handles bytes and paths
chosen by the server. It knows no formats.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")

LOCK_TIMEOUT: Final = 5.0  # seconds at the start; a transaction takes milliseconds


class FolderError(ValueError):
    """The folder cannot be used; the message begins with the name of its setting."""


class DiskFullError(Exception):
    """There is no room on the disk, or the user's share of it is used up."""


class Disk:
    """A shared folder and one writing thread, which runs the work passed to it in call order."""

    def __init__(self, root: Path) -> None:
        """Create the folder if it is missing, and check that it can be locked. Raises `FolderError`."""
        self.root = root
        self._readers: list[Callable[[], None]] = []
        self._num_seen: int | None = None  # changes that the readers have read
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FolderError(f"batch_dir {root} cannot be used: {error.strerror}") from error
        self._check_lock()
        self._thread = ThreadPoolExecutor(1, "batch-disk")

    def folder(self, name: str) -> Path:
        """Return the subfolder `name`; create it if it is missing."""
        path = self.root / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def register(self, reader: Callable[[], None]) -> None:
        """Call `reader` in the next transaction, and in each one after any server has changed the folder.

        It reads what the folder holds into memory.
        """
        self._readers.append(reader)
        self._num_seen = None

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

    async def change(self, work: Callable[[*Args], T], *arguments: *Args) -> T:
        """As `run`, in a transaction: the memory is up to date, and no other server changes the folder.

        `work` updates the memory too.
        """
        return await self.run(self.change_now, work, *arguments)

    def change_now(self, work: Callable[[*Args], T], *arguments: *Args) -> T:
        """As `change`, in the calling thread."""
        with self._transaction():
            # Before the work: if this process dies amid it, the others read the folder again. If it fails,
            # this process does too.
            num_changes = (self._num_seen or 0) + 1
            self._num_seen = None
            os.pwrite(self._lock, num_changes.to_bytes(8), 0)
            result = work(*arguments)
            self._num_seen = num_changes
            return result

    def read_now(self) -> None:
        """Let the readers read what other servers have changed."""
        with self._transaction():
            pass

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            num_changes = int.from_bytes(os.pread(self._lock, 8, 0))
            if num_changes != self._num_seen:
                self._num_seen = None
                for reader in self._readers:
                    reader()
                self._num_seen = num_changes
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Wait for pending writes."""
        self._thread.shutdown()
        os.close(self._lock)

    def _check_lock(self) -> None:
        """Raise `FolderError` if the folder cannot be locked within some seconds."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                return
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK and time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                os.close(self._lock)
                raise FolderError(
                    f"batch_dir {self.root} cannot be locked: {error.strerror}. Its file system must have "
                    "locks (flock), and no server of an older version may use it"
                ) from error


def try_lock(path: Path) -> int | None:
    """Lock a file, which is created if it is missing, until its descriptor is closed or the process dies.

    Returns the descriptor, or None if it is locked.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise
        return None
    return descriptor


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

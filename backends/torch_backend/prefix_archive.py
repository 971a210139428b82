"""Stored blocks of prompts as files, which outlive the server and are shared by servers of one host.

One file a block, because a file gets its final name at once, evicted alone, and read by any number of
servers without a lock; an embedded database would add a lock and give no space back. A file is named by the
block's key, in a folder named by the model's fingerprint. It is written by a thread of its own. A file that
is broken or not ours is a miss, and a failed write turns writing off.
"""

import itertools
import logging
import os
import queue
import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from backends.interface import ArchiveStats
from backends.torch_backend.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

_MAGIC = b"snapserve block 1\n"
_SUFFIX = ".block"
# The folder may hold files of other programs: only these are ours to count and to delete.
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.block")
_UNFINISHED_NAME = re.compile(r"\.[0-9a-f]{32}\.unfinished")
_MAX_QUEUED_BYTES = 64 << 20  # of blocks that wait to be written; more are dropped
_MIN_QUEUED_BLOCKS = 64  # may wait, however large they are: a chunk stores several at once
_CLOSE_LIMIT = 10.0  # seconds for writing them at the end
_ABANDONED = 600.0  # seconds after which an unfinished file is that of a server that was killed
_KEPT_SHARE = 0.9  # of the limit, after an eviction
_WRITES_BETWEEN_COUNTS = 256  # other servers write to the folder, too


class FileArchive:
    """The blocks of one model below `root`, which has at most `max_bytes` of blocks of all models.

    Raises ValueError for a folder that cannot be written, or a limit below one block.
    """

    def __init__(self, root: Path, max_bytes: int, fingerprint: str, store: PrefixStore) -> None:
        self._root = root
        self._folder = root / fingerprint
        self._store = store
        self._file_bytes = len(_header(b"")) + 32 + store.block_bytes
        self._max_bytes = max_bytes
        if max_bytes < self._file_bytes:
            raise ValueError(
                f"prefix_cache_disk_bytes must be at least the {self._file_bytes} of a block, got {max_bytes}"
            )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._num_bytes = sum(size for _, size, _ in self._blocks())
        except OSError as error:
            raise ValueError(
                f"prefix_cache_dir must be a folder that can be written, got {root}: {error.strerror}"
            ) from error
        self._held: dict[int, bytes] = {}  # the keys of the blocks in memory, by number
        self._is_writing = True
        self._num_queued_bytes = 0
        self._count_lock = threading.Lock()  # for the number of queued bytes
        self._file_lock = threading.Lock()  # held while a file is written
        self._num_resets = 0
        self._num_loaded = 0
        self._num_saved = 0
        # A key, its block, and the number of resets before it.
        self._queue: queue.SimpleQueue[tuple[bytes, bytes, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="prefix-archive", daemon=True)
        self._thread.start()

    def load(self, key: bytes, number: int) -> bool:
        """Copy a block from its file into the store; return whether there was a valid one."""
        path = self._path(key)
        try:
            data = bytearray(path.read_bytes())
        except OSError:
            return False
        payload = memoryview(data)[self._file_bytes - self._store.block_bytes :]
        if len(data) != self._file_bytes or data[: -len(payload)] != _header(payload) + key:
            logger.warning("the stored block %s is broken: it is deleted, and its tokens are read", path)
            with suppress(OSError):
                path.unlink()
            return False
        with suppress(OSError):
            os.utime(path)  # it was used now
        self._store.fill(number, payload)
        self._held[number] = key
        self._num_loaded += 1
        return True

    def save(self, key: bytes, number: int) -> None:
        """Write a block of the store to its file, soon. Dropped if too many wait."""
        self._held[number] = key
        limit = max(_MAX_QUEUED_BYTES, _MIN_QUEUED_BLOCKS * self._file_bytes)
        if not self._is_writing or self._num_queued_bytes + self._file_bytes > limit:
            return
        with self._count_lock:
            self._num_queued_bytes += self._file_bytes
        self._queue.put((key, self._store.dump(number), self._num_resets))

    def reset(self) -> None:
        """Delete the model's blocks."""
        with self._file_lock:
            self._num_resets += 1  # the thread may have taken a block that it has not begun to write
            while not self._queue.empty():
                with suppress(queue.Empty):
                    self._written(self._queue.get_nowait())
            for path in self._folder.glob(f"*{_SUFFIX}"):
                with suppress(OSError):
                    path.unlink()

    def stats(self) -> ArchiveStats:
        num_held = self._num_bytes // self._file_bytes
        return ArchiveStats(self._num_loaded, self._num_saved, num_held, self._is_writing)

    def close(self) -> None:
        """Write what waits, for some seconds."""
        self._queue.put(None)
        self._thread.join(_CLOSE_LIMIT)
        self._is_writing = False

    def _write_all(self) -> None:
        for num_written in itertools.count():
            item = self._queue.get()
            if item is None:
                return
            key, payload, num_resets = item
            with self._file_lock:
                try:
                    self._make_room(must_count=num_written % _WRITES_BETWEEN_COUNTS == 0)
                    if num_resets == self._num_resets:
                        self._write(key, payload)
                except OSError as error:
                    self._is_writing = False
                    logger.warning("stored prompts are no longer written to %s: %s", self._folder, error)
                    return
                finally:
                    self._written(item)

    def _written(self, item: tuple[bytes, bytes, int] | None) -> None:
        if item is not None:
            with self._count_lock:
                self._num_queued_bytes -= self._file_bytes

    def _write(self, key: bytes, payload: bytes) -> None:
        """Write a file, unless another server, or this one before, has written the same."""
        path = self._path(key)
        with suppress(FileNotFoundError):
            if path.read_bytes() == _header(payload) + key + payload:
                os.utime(path)
                return
        unfinished = self._folder / f".{uuid.uuid4().hex}.unfinished"
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_header(payload) + key)
                file.write(payload)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        self._num_bytes += self._file_bytes
        self._num_saved += 1

    def _make_room(self, *, must_count: bool) -> None:
        """Delete the least recently used files if one more would exceed the limit."""
        if not must_count and self._num_bytes + self._file_bytes <= self._max_bytes:
            return
        self._touch_held()
        blocks = sorted(self._blocks())
        self._num_bytes = sum(size for _, size, _ in blocks)
        if self._num_bytes + self._file_bytes <= self._max_bytes:
            return
        for _, size, path in blocks:
            with suppress(FileNotFoundError):  # another server has deleted it
                path.unlink()
            self._num_bytes -= size
            if self._num_bytes + self._file_bytes <= _KEPT_SHARE * self._max_bytes:
                break

    def _touch_held(self) -> None:
        """Mark the files of blocks in memory as used: prompts that find them there do not read files."""
        for key in list(self._held.values()):
            with suppress(OSError):
                os.utime(self._path(key))

    def _blocks(self) -> Iterator[tuple[float, int, Path]]:
        """Yield last use, size and path of the blocks of all models; delete abandoned unfinished files."""
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if _BLOCK_NAME.fullmatch(path.name):
                    yield stat.st_mtime, stat.st_size, path
                elif _UNFINISHED_NAME.fullmatch(path.name) and time.time() - stat.st_mtime > _ABANDONED:
                    path.unlink()

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"


def _header(payload: bytes | memoryview) -> bytes:
    return _MAGIC + zlib.crc32(payload).to_bytes(4, "big")

"""Stored responses in a SQLite file, so that they outlive the process. The rest of the state is in memory."""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from backends.clock import CalendarClock
from server.options.settings import StorageLimits
from server.state.interface import RunningResponse, StateError, StateObserver, StoredResponse
from server.state.memory import MemoryBuckets

logger: Final = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT: Final = 1.0  # seconds for which a command waits for another process's

# `size` is before the contents, so that sums do not read them.
_SCHEMA: Final = """
PRAGMA secure_delete = ON;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT, id TEXT, deadline REAL, size INTEGER, body BLOB, items BLOB, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS sizes ON responses (owner, size);
CREATE INDEX IF NOT EXISTS deadlines ON responses (deadline);
"""
_DROP_OLDEST: Final = """
DELETE FROM responses WHERE rowid = (
    SELECT min(rowid) FROM responses WHERE owner = (
        SELECT owner FROM responses GROUP BY owner ORDER BY {of_most} DESC LIMIT 1
    )
)
"""


class SqliteState:
    """The state of one replica, with its stored responses in a file."""

    def __init__(self, path: Path, limits: StorageLimits, observer: StateObserver) -> None:
        """Open or create the file. Raises `StateError`."""
        self.buckets = MemoryBuckets()
        self.responses = SqliteResponses(path, limits, observer)
        self.served = None

    async def close(self) -> None:
        await self.responses.close()


class SqliteResponses:
    """The limits are those of `MemoryResponses`. Commands run one at a time in a thread of their own."""

    def __init__(
        self,
        path: Path,
        limits: StorageLimits,
        observer: StateObserver,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`now` returns seconds since 1970. Raises `StateError`."""
        self._limits = limits
        self._observer = observer
        self._now = now if now is not None else CalendarClock().now
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self.num_responses = 0
        self.num_bytes = 0
        try:
            self._thread.submit(self._open, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise StateError(f"{path} cannot be used: {error}") from error

    async def put(self, owner: str, response: StoredResponse) -> bool:
        if response.num_bytes > self._limits.max_bytes or self._limits.max_responses == 0:
            return False
        try:
            return await self._run(self._write, self._put, owner, response)
        except StateError:
            return False

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        # No write, so that stored responses stay readable on a full disk.
        return await self._run(self._get, owner, response_id)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._run(self._delete_and_erase, owner, response_id)

    # Other replicas do not see what this one makes.

    async def announce(self, _owner: str, _response_id: str, _body: bytes | None, /) -> bool:
        return True

    async def withdraw(self, _owner: str, _response_id: str, /) -> None: ...

    async def running(self, _owner: str, _response_id: str, /) -> RunningResponse | None:
        return None

    async def cancel(self, _owner: str, _response_id: str, /) -> None: ...

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in the thread. Raises `StateError`."""

        def run() -> T:
            result = work(*arguments)
            self._count()
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except sqlite3.Error as error:
            logger.error("the file of stored responses cannot be used: %s", error)
            self._observer.lost_state()
            raise StateError(str(error)) from error

    # In the thread

    def _open(self, path: Path) -> None:
        # Only the server's user may read it. SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._connection = sqlite3.connect(path, timeout=TIMEOUT, isolation_level=None)
        self._connection.executescript(_SCHEMA)
        self._count()

    def _write(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in a transaction, which is undone if it fails. Expired responses are deleted first."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("DELETE FROM responses WHERE deadline <= ?", (self._now(),))
            return work(*arguments)

    def _delete_and_erase(self, owner: str, response_id: str) -> bool:
        """Delete a response, and empty the log, which still has its contents."""
        is_deleted = self._write(self._delete, owner, response_id)
        if is_deleted:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.Error as error:
                logger.warning("the log of deleted responses could not be emptied: %s", error)
        return is_deleted

    def _put(self, owner: str, response: StoredResponse) -> bool:
        execute = self._connection.execute
        execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)",
            (
                owner,
                response.response_id,
                self._now() + self._limits.ttl,
                response.num_bytes,
                response.body,
                response.input_items,
            ),
        )
        while self._sizes()[0] > self._limits.max_responses:
            execute(_DROP_OLDEST.format(of_most="count(*)"))
        while self._sizes()[1] > self._limits.max_bytes:
            execute(_DROP_OLDEST.format(of_most="sum(size)"))
        return self._get(owner, response.response_id) is not None

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        found = self._connection.execute(
            "SELECT body, items FROM responses WHERE owner = ? AND id = ? AND deadline > ?",
            (owner, response_id, self._now()),
        ).fetchone()
        return None if found is None else StoredResponse(response_id, *found)

    def _delete(self, owner: str, response_id: str) -> bool:
        found = self._connection.execute(
            "DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id)
        )
        return found.rowcount > 0

    def _sizes(self) -> tuple[int, int]:
        number, size = self._connection.execute("SELECT count(*), sum(size) FROM responses").fetchone()
        return number, size or 0

    def _count(self) -> None:
        self.num_responses, self.num_bytes = self._sizes()

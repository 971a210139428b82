"""The files and batches of one server, for its routes."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from backends.clock import CalendarClock
from server.batches.disk import Disk
from server.batches.files import FileStore
from server.batches.limits import BatchLimits
from server.batches.store import BatchStore
from server.http.errors import ApiError
from server.options.settings import BatchOptions

DISABLED = "Files and batches are disabled: the server was started without --batch-dir."


class Batches:
    """The files and batches in one folder, which servers may share. A context manager."""

    def __init__(
        self, folder: Path, options: BatchOptions, limits: BatchLimits, now: Callable[[], float] | None = None
    ) -> None:
        """Load the folder's files and batches. `now` returns seconds since 1970. Raises `FolderError`."""
        now = now if now is not None else CalendarClock().now
        self.options = options
        self.limits = limits
        self.now = now
        self.disk = Disk(folder)
        self.files = FileStore(self.disk, options, limits.max_uploads, now)
        self.store = BatchStore(self.disk, self.files, limits, now)
        self.disk.read_now()

    def close(self) -> None:
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enabled(batches: Batches | None) -> Batches:
    """Return `batches`. Raises `ApiError` if the server has none."""
    if batches is None:
        raise ApiError(404, "batches_disabled", DISABLED)
    return batches


async def up_to_date(batches: Batches | None) -> Batches:
    """Return `batches` with what other servers have done. Raises `ApiError` if the server has none."""
    found = enabled(batches)
    await found.store.refresh()
    return found

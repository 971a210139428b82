"""The files and batches of one server, for its routes."""

from collections.abc import Callable
from typing import Self

from backends.clock import CalendarClock
from server.batches.disk import Disk
from server.batches.files import FileStore
from server.batches.store import BatchStore
from server.http.errors import ApiError
from server.options.settings import BatchSettings

DISABLED = "Files and batches are disabled: the server was started without --batch-dir."


class Batches:
    """The files and batches in one folder, which servers may share. A context manager."""

    def __init__(self, settings: BatchSettings, now: Callable[[], float] | None = None) -> None:
        """Load the folder's files and batches. `now` returns seconds since 1970. Raises `FolderError`."""
        now = now if now is not None else CalendarClock().now
        self.settings = settings
        self.now = now
        self.disk = Disk(settings.folder)
        self.files = FileStore(self.disk, settings, now)
        self.store = BatchStore(self.disk, self.files, settings, now)
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

"""Files and batches together, as routes get them."""

import time
from collections.abc import Callable
from typing import Self

from server.batches.disk import Disk
from server.batches.files import FileStore
from server.batches.store import BatchStore
from server.http.errors import ApiError
from server.options.settings import BatchSettings

DISABLED = "This server keeps no files and runs no batches: it was started without --batch-dir."


class Batches:
    """What is kept in one folder. Close it when nothing uses it any more."""

    def __init__(self, settings: BatchSettings, now: Callable[[], float] = time.time) -> None:
        """Take the folder and read what is there. Raises `FolderError`."""
        self.settings, self.now = settings, now
        self.disk = Disk(settings.folder)
        self.files = FileStore(self.disk, settings, now)
        self.store = BatchStore(self.disk, self.files, settings, now)

    def close(self) -> None:
        self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enabled(batches: Batches | None) -> Batches:
    """Return them where there are any. Raises `ApiError`."""
    if batches is None:
        raise ApiError(404, "batches_disabled", DISABLED)
    return batches

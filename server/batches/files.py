"""Files as clients see them: content under an unguessable id, with an owner, a size and an expiry time.

A file's content is in `ID.data` and its record in `ID.json`. The record is written first. One of the two
without the other is the rest of an upload or a deletion that a crash interrupted. Names from clients are
stored as text and never become paths.
"""

import enum
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from server.batches.disk import Disk, move, try_lock, write_atomically
from server.batches.quota import Quota
from server.http.errors import ApiError, conflict, overloaded
from server.options.settings import BatchOptions

logger: Final = logging.getLogger(__name__)

DEFAULT_LIFETIME: Final = 30 * 24 * 3600  # seconds; OpenAI's default for files of batches


class Purpose(enum.StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's record. Times are Unix seconds. `owner` is the name of an API key, or empty without keys."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: float
    expires_at: float


_RECORD: Final = TypeAdapter(StoredFile)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


class FileStore:
    """The files of all owners and all servers. Lookups run on the event loop, writes in the disk's thread.

    `read_ids` returns the ids of the files that unfinished batches read. These are not deleted.
    """

    def __init__(self, disk: Disk, options: BatchOptions, max_uploads: int, now: Callable[[], float]) -> None:
        """Remove incomplete files that a crash left. The disk's first transaction reads the others."""
        self._disk = disk
        self._max_files = options.max_files
        self._max_uploads = max_uploads
        self._now = now
        self._folder = disk.folder("files")
        # Replaced by the disk's thread, never changed, so that the event loop may read it at any time.
        self._files: dict[str, StoredFile] = {}
        self.read_ids: Callable[[], Collection[str]] = tuple
        self.quota = Quota(options.max_file_storage)
        self.quota.sources.append(lambda: sum(file.num_bytes for file in self._files.values()))
        self.uploads = Counter[str]()  # uploads in progress at this server, by owner
        disk.change_now(self._clean)
        disk.register(self._read)

    def draft_path(self, file_id: str) -> Path:
        """Return the path of an upload in progress."""
        return self._folder / f"{file_id}.draft"

    def get(self, file_id: str, owner: str) -> StoredFile:
        """Return an owner's file. Raises `ApiError` if there is none: another owner's file is reported as
        missing too.
        """
        file = self._files.get(file_id)
        if file is None or file.owner != owner or self._has_expired(file):
            raise no_such_file(file_id)
        return file

    def __contains__(self, file_id: str) -> bool:
        return file_id in self._files

    def content_of(self, file_id: str) -> Path:
        """Return the path of a file's content. Does not check the owner."""
        return self._folder / f"{file_id}.data"

    def of(self, owner: str) -> Iterable[StoredFile]:
        """Return an owner's files, the oldest first."""
        return [file for file in self._files.values() if file.owner == owner and not self._has_expired(file)]

    def check_room(self, owner: str) -> None:
        """Check that `owner` may start another upload. Raises `ApiError`."""
        if len(self._files) + self.uploads.total() >= self._max_files:
            message = (
                f"The server stores at most {self._max_files} files. "
                "Please delete files that you no longer need."
            )
            raise ApiError(413, "file_limit_exceeded", message, param="file")
        max_uploads = self._max_uploads
        if self.uploads.total() >= max_uploads:
            raise overloaded(
                f"The server accepts at most {max_uploads} uploads at once. Please try again.", retry_after=1
            )
        # One key gets half of the uploads, rounded up, so that it cannot block the other keys.
        max_uploads_of_key = (max_uploads + 1) // 2
        if owner and self.uploads[owner] >= max_uploads_of_key:
            raise overloaded(
                f"The server accepts at most {max_uploads_of_key} uploads at once from one key. "
                "Please try again.",
                retry_after=1,
            )

    async def keep(self, file: StoredFile, source: Path) -> None:
        """Add a file, and move its content here from `source`."""
        await self._disk.change(self._keep, file, source)

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete an owner's file. Raises `ApiError`."""
        await self._disk.change(self._delete, file_id, owner)

    async def expire(self) -> None:
        """Remove the expired files that no unfinished batch reads."""
        if any(map(self._has_expired, self._files.values())):
            await self._disk.change(self._expire)

    def _has_expired(self, file: StoredFile) -> bool:
        return file.expires_at <= self._now()

    # In the disk's thread, in a transaction

    def _read(self) -> None:
        """Read the records of new files, and forget those that are gone."""
        ids = {path.stem for path in self._folder.glob("*.json")}
        files = [file for file in self._files.values() if file.id in ids]
        files += [
            record
            for file_id in ids - self._files.keys()
            if self.content_of(file_id).exists()
            and (record := _load_record(self._folder / f"{file_id}.json")) is not None
        ]
        files.sort(key=lambda file: (file.created_at, file.id))
        self._files = {file.id: file for file in files}

    def _clean(self) -> None:
        """Remove what a crash left: one of a file's two parts, and uploads whose server is gone."""
        for path in self._folder.iterdir():
            other = {".json": ".data", ".data": ".json"}.get(path.suffix)
            if other is not None and path.with_suffix(other).exists():
                continue
            lock = try_lock(path)
            if lock is not None:
                path.unlink()
                os.close(lock)

    def _keep(self, file: StoredFile, source: Path) -> None:
        write_atomically(self._folder / f"{file.id}.json", _RECORD.dump_json(file))
        move(source, self.content_of(file.id))
        self._files = {**self._files, file.id: file}

    def _delete(self, file_id: str, owner: str) -> None:
        file = self.get(file_id, owner)
        if file_id in self.read_ids():
            raise conflict(
                "file_in_use", f"File '{file_id}' is the input of a batch that has not ended.", "file_id"
            )
        self._remove(file)

    def _expire(self) -> None:
        read_ids = self.read_ids()
        for file in self._files.values():
            if self._has_expired(file) and file.id not in read_ids:
                self._remove(file)

    def _remove(self, file: StoredFile) -> None:
        self._files = {file_id: other for file_id, other in self._files.items() if file_id != file.id}
        # The content goes first: after a crash here, the next start removes the record.
        self.content_of(file.id).unlink(missing_ok=True)
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)


def no_such_file(file_id: str) -> ApiError:
    return ApiError(404, "file_not_found", f"No such File object: {file_id[:128]}", param="file_id")


def _load_record(path: Path) -> StoredFile | None:
    # An unreadable record may be another version's: the file is not served, but not removed either.
    try:
        return _RECORD.validate_json(path.read_bytes())
    except ValueError:
        logger.warning("%s is not a valid file record; it is ignored and not deleted", path)
        return None

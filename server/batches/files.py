"""Files as clients see them: content under an unguessable id, with an owner, a size and an expiry time.

A file's content is in `ID.data` and its record in `ID.json`. The record is written first. One of the two
without the other is the rest of an upload or a deletion that a crash interrupted. Names from clients are
stored as text and never become paths.
"""

import enum
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from server.batches.disk import Disk, move, write_atomically
from server.batches.quota import Quota
from server.http.errors import ApiError, conflict, overloaded
from server.options.settings import BatchSettings

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
    """The files of all owners. Lookups run on the event loop, writes in the disk's thread."""

    def __init__(self, disk: Disk, settings: BatchSettings, now: Callable[[], float]) -> None:
        """Read the stored files, and remove incomplete ones that a crash left."""
        self._disk = disk
        self._settings = settings
        self._now = now
        self._folder = disk.folder("files")
        self._holds: Counter[str] = Counter()  # unfinished batches that read a file, by file id
        self.quota = Quota(settings.max_disk_bytes)
        self.uploads = Counter[str]()  # uploads in progress, by owner
        records = sorted(_load_records(self._folder), key=lambda file: (file.created_at, file.id))
        self._files = {file.id: file for file in records}
        self.quota.add(sum(file.num_bytes for file in records))

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
        if len(self._files) + self.uploads.total() >= self._settings.max_files:
            message = (
                f"The server stores at most {self._settings.max_files} files. "
                "Please delete files that you no longer need."
            )
            raise ApiError(413, "file_limit_exceeded", message, param="file")
        max_uploads = self._settings.max_uploads
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
        """Add a file, and move its content here from `source`. The quota must include the content already."""
        await self._disk.run(self._write, file, source)
        self._files[file.id] = file

    def hold(self, file_id: str) -> None:
        """Protect a file from deletion until `release`. Holds are counted."""
        self._holds[file_id] += 1

    def release(self, file_id: str) -> None:
        self._holds[file_id] -= 1

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete an owner's file. Raises `ApiError`."""
        file = self.get(file_id, owner)
        if self._holds[file_id] > 0:
            raise conflict(
                "file_in_use", f"File '{file_id}' is the input of a batch that has not ended.", "file_id"
            )
        await self._remove(file)

    async def expire(self) -> None:
        """Remove the expired files that no unfinished batch reads."""
        expired = [
            file for file in self._files.values() if self._has_expired(file) and self._holds[file.id] <= 0
        ]
        for file in expired:
            await self._remove(file)

    def _has_expired(self, file: StoredFile) -> bool:
        return file.expires_at <= self._now()

    def _write(self, file: StoredFile, source: Path) -> None:
        write_atomically(self._folder / f"{file.id}.json", _RECORD.dump_json(file))
        move(source, self.content_of(file.id))

    async def _remove(self, file: StoredFile) -> None:
        del self._files[file.id]
        self.quota.add(-file.num_bytes)
        await self._disk.run(self._unlink, file)

    def _unlink(self, file: StoredFile) -> None:
        # The content goes first: after a crash here, the next start removes the record.
        self.content_of(file.id).unlink(missing_ok=True)
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)


def no_such_file(file_id: str) -> ApiError:
    return ApiError(404, "file_not_found", f"No such File object: {file_id[:128]}", param="file_id")


def _load_records(folder: Path) -> list[StoredFile]:
    """Return the records of all complete files, and remove all other files from `folder`."""
    records: list[StoredFile] = []
    complete_ids = set[str]()
    for path in folder.glob("*.json"):
        if not path.with_suffix(".data").exists():
            continue
        # An unreadable record may be another version's: the file is not served, but not removed either.
        complete_ids.add(path.stem)
        try:
            records.append(_RECORD.validate_json(path.read_bytes()))
        except ValueError:
            logger.warning("%s is not a valid file record; it is ignored and not deleted", path)
    for path in folder.iterdir():
        if path.stem not in complete_ids or path.suffix not in (".json", ".data"):
            path.unlink()
    return records

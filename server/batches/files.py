"""Files as clients see them: content under an id that cannot be guessed, with an owner, a size and perhaps an end.

A file's content lies in `ID.data`, what is known of it in `ID.json`, written first: a name without content, or content without a name, is
what a crash left of a file that was never whole. Names given by clients are kept as text and never become paths.
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

from server.batches.disk import Disk, move, write_whole
from server.batches.quota import Quota
from server.http.errors import ApiError, conflict, overloaded
from server.options.settings import BatchSettings

logger: Final = logging.getLogger(__name__)

DEFAULT_LIFETIME: Final = 30 * 24 * 3600  # seconds: OpenAI's for files of batches


class Purpose(enum.StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Times are Unix seconds. `owner` is the name of an API key, empty where there are none."""

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
    """All files, of all owners. Looked up on the event loop, written in the disk's thread."""

    def __init__(self, disk: Disk, settings: BatchSettings, now: Callable[[], float]) -> None:
        """Read what is there, and remove what a crash left unfinished."""
        self._disk, self._settings, self._now = disk, settings, now
        self._folder = disk.folder("files")
        self._holds: Counter[str] = Counter()
        self.quota = Quota(settings.max_disk_bytes)
        self.uploads = Counter[str]()  # under way, by owner
        records = sorted(_read_records(self._folder), key=lambda file: (file.created_at, file.id))
        self._files = {file.id: file for file in records}
        self.quota.add(sum(file.num_bytes for file in records))

    def draft_path(self, file_id: str) -> Path:
        """Return where the content of a file grows that is not one yet."""
        return self._folder / f"{file_id}.draft"

    def get(self, file_id: str, owner: str) -> StoredFile:
        """Return an owner's file. Raises `ApiError`; another's file is as if it were not there."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner or self._is_over(file):
            raise no_such_file(file_id)
        return file

    def __contains__(self, file_id: str) -> bool:
        return file_id in self._files

    def content_of(self, file_id: str) -> Path:
        """Return where a file's content lies, whoever owns it."""
        return self._folder / f"{file_id}.data"

    def of(self, owner: str) -> Iterable[StoredFile]:
        """Return an owner's files, the oldest first."""
        return [file for file in self._files.values() if file.owner == owner and not self._is_over(file)]

    def check_room(self, owner: str) -> None:
        """Refuse one more upload; a key may have half of them at once. Raises `ApiError`."""
        if len(self._files) + self.uploads.total() >= self._settings.max_files:
            message = f"The server holds at most {self._settings.max_files} files. Please delete some that you do not need any more."
            raise ApiError(413, "file_limit_exceeded", message, param="file")
        most = self._settings.max_uploads
        if self.uploads.total() >= most:
            raise overloaded(
                f"The server takes at most {most} files at once. Please try again.", retry_after=1
            )
        if owner and self.uploads[owner] >= (most + 1) // 2:
            raise overloaded(
                f"The server takes at most {(most + 1) // 2} files at once from one key. Please try again.",
                retry_after=1,
            )

    async def keep(self, file: StoredFile, source: Path) -> None:
        """Take over the content at `source`, which is on the disk and counted in the quota."""
        await self._disk.run(self._write, file, source)
        self._files[file.id] = file

    def hold(self, file_id: str) -> None:
        """Keep a file from being deleted until it is let go."""
        self._holds[file_id] += 1

    def let_go(self, file_id: str) -> None:
        self._holds[file_id] -= 1

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete an owner's file. Raises `ApiError`."""
        file = self.get(file_id, owner)
        if self._holds[file_id] > 0:
            raise conflict(
                "file_in_use", f"File '{file_id}' is read by a batch that has not ended.", "file_id"
            )
        await self._remove(file)

    async def expire(self) -> None:
        """Remove the files whose time is over, as soon as no batch reads them."""
        for file in [
            file for file in self._files.values() if self._is_over(file) and self._holds[file.id] <= 0
        ]:
            await self._remove(file)

    def _is_over(self, file: StoredFile) -> bool:
        return file.expires_at <= self._now()

    def _write(self, file: StoredFile, source: Path) -> None:
        write_whole(self._folder / f"{file.id}.json", _RECORD.dump_json(file))
        move(source, self.content_of(file.id))

    async def _remove(self, file: StoredFile) -> None:
        del self._files[file.id]
        self.quota.add(-file.num_bytes)
        await self._disk.run(self._unlink, file)

    def _unlink(self, file: StoredFile) -> None:
        self.content_of(file.id).unlink(missing_ok=True)
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)


def no_such_file(file_id: str) -> ApiError:
    return ApiError(404, "file_not_found", f"No such File object: {file_id[:128]}", param="file_id")


def _read_records(folder: Path) -> list[StoredFile]:
    records, whole = [], set[str]()
    for path in folder.glob("*.json"):
        if not path.with_suffix(".data").exists():
            continue
        whole.add(path.stem)
        try:
            records.append(_RECORD.validate_json(path.read_bytes()))
        except ValueError:
            logger.warning("%s is no file's record and is left alone", path)
    for path in folder.iterdir():
        if path.stem not in whole or path.suffix not in (".json", ".data"):
            path.unlink()
    return records

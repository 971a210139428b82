"""All batches and the states they are in, on the disk before anyone is told. What runs them is told of those that are new or cancelled."""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from server.batches.batch import COMPLETION_WINDOW, Batch, BatchStatus, Counts, new_batch_id
from server.batches.disk import Disk, write_whole
from server.batches.files import DEFAULT_LIFETIME, FileStore, Purpose
from server.batches.journal import Journal
from server.http.errors import ApiError, conflict, invalid_value, overloaded
from server.options.settings import BatchSettings
from server.protocol.batches import BatchRequest

logger: Final = logging.getLogger(__name__)

_RECORD: Final = TypeAdapter(Batch)


class BatchStore:
    """Looked up on the event loop, written in the disk's thread. Files that batches read are held until they have ended."""

    def __init__(
        self, disk: Disk, files: FileStore, settings: BatchSettings, now: Callable[[], float]
    ) -> None:
        self._disk, self._files, self._settings, self._now = disk, files, settings, now
        self._folder = disk.folder("batches")
        records = sorted(_read_records(self._folder), key=lambda batch: (batch.created_at, batch.id))
        self._batches = {batch.id: batch for batch in records}
        self.changed: asyncio.Queue[str] = asyncio.Queue()
        for batch in self.unfinished():
            files.hold(batch.input_file_id)
            files.quota.add(sum(path.stat().st_size for path in self.folder(batch.id).glob("*.jsonl")))

    def folder(self, batch_id: str) -> Path:
        return self._folder / batch_id

    def __getitem__(self, batch_id: str) -> Batch:
        return self._batches[batch_id]

    def get(self, batch_id: str, owner: str) -> Batch:
        """Return an owner's batch. Raises `ApiError`; another's is as if it were not there."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise no_such_batch(batch_id)
        return batch

    def of(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def unfinished(self) -> list[Batch]:
        """Return those that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.status.has_ended]

    def num_by_status(self) -> Counter[BatchStatus]:
        return Counter(batch.status for batch in self._batches.values())

    async def create(self, request: BatchRequest, owner: str, endpoints: Collection[str]) -> Batch:
        """Write a new batch down. Raises `ApiError`."""
        if request.endpoint not in endpoints:
            raise invalid_value(
                f"'endpoint' must be one of {', '.join(sorted(endpoints))}, got '{request.endpoint[:128]}'.",
                "endpoint",
            )
        file = self._files.get(request.input_file_id, owner)
        if file.purpose is not Purpose.BATCH:
            raise invalid_value(
                f"File '{file.id}' has purpose '{file.purpose}', a batch's input must have 'batch'.",
                "input_file_id",
            )
        if len(self.unfinished()) >= self._settings.max_unfinished:
            raise overloaded(
                f"At most {self._settings.max_unfinished} batches may be under way. Please try again later.",
                retry_after=60,
            )
        now, expiry = self._now(), request.output_expires_after
        batch = Batch(
            id=new_batch_id(),
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=file.id,
            metadata=request.metadata,
            output_lifetime=DEFAULT_LIFETIME if expiry is None else expiry.seconds,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW,
        )
        self._files.hold(file.id)
        await asyncio.shield(self._begin(batch))
        return batch

    async def cancel(self, batch_id: str, owner: str) -> Batch:
        """Let nothing more of a batch be run. Raises `ApiError`."""
        batch = self.get(batch_id, owner)
        if batch.status is BatchStatus.CANCELLING:
            return batch
        if not batch.status.may_run:
            raise conflict(
                "batch_not_cancellable", f"Cannot cancel a batch with status '{batch.status}'.", "batch_id"
            )
        batch = replace(batch.entered(BatchStatus.CANCELLING, self._now()), ending=BatchStatus.CANCELLED)
        self.changed.put_nowait(batch.id)
        await asyncio.shield(self.put(batch))
        return batch

    async def put(self, batch: Batch) -> None:
        """Put a batch's new state in the place of its old one. Who is here sees it at once, and the disk before this returns."""
        self._batches[batch.id] = batch
        if batch.status.has_ended:
            self._files.let_go(batch.input_file_id)
        await self._disk.run(write_whole, self.folder(batch.id) / "batch.json", _RECORD.dump_json(batch))

    def count(self, batch_id: str, journal: Journal) -> None:
        """Say how many lines have an answer; not written, since the journal is."""
        batch = self._batches[batch_id]
        counts = Counts(batch.counts.total, journal.num_completed, journal.num_failed)
        self._batches[batch_id] = replace(batch, counts=counts, usage=journal.usage)

    async def _begin(self, batch: Batch) -> None:
        await self._disk.run(self.folder(batch.id).mkdir, 0o700)
        await self.put(batch)
        self.changed.put_nowait(batch.id)
        ended = [old.id for old in self._batches.values() if old.status.has_ended]
        for old in ended[: max(0, len(self._batches) - self._settings.max_batches)]:
            del self._batches[old]
            await self._disk.run(shutil.rmtree, self.folder(old))


def no_such_batch(batch_id: str) -> ApiError:
    return ApiError(404, "batch_not_found", f"No batch found with id '{batch_id[:128]}'.", param="batch_id")


def _read_records(folder: Path) -> list[Batch]:
    records = []
    for path in folder.iterdir():
        try:
            records.append(_RECORD.validate_json((path / "batch.json").read_bytes()))
        except FileNotFoundError:  # a crash came before it was one
            shutil.rmtree(path)
        except ValueError:
            logger.warning("%s is no batch's record and is left alone", path)
    return records

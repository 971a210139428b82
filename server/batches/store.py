"""All batches and their states. A request that changes a state is answered when the state is on the disk.

The queue `BatchStore.changed` notifies the runner of new and cancelled batches.
"""

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
from server.batches.disk import Disk, write_atomically
from server.batches.files import DEFAULT_LIFETIME, FileStore, Purpose
from server.batches.journal import Journal
from server.http.errors import ApiError, conflict, invalid_value, overloaded
from server.options.settings import BatchSettings
from server.protocol.batches import BatchRequest

logger: Final = logging.getLogger(__name__)

_RECORD: Final = TypeAdapter(Batch)


class BatchStore:
    """The batches of all owners. Lookups run on the event loop, writes in the disk's thread.

    The input file of a batch is held until the batch has ended.
    """

    def __init__(
        self, disk: Disk, files: FileStore, settings: BatchSettings, now: Callable[[], float]
    ) -> None:
        """Load the stored batches. Adds the unfinished ones' holds and journal sizes to `files`."""
        self._disk = disk
        self._files = files
        self._settings = settings
        self._now = now
        self._folder = disk.folder("batches")
        records = sorted(_load_records(self._folder), key=lambda batch: (batch.created_at, batch.id))
        self._batches = {batch.id: batch for batch in records}
        self.changed: asyncio.Queue[str] = asyncio.Queue()  # ids of new and cancelled batches
        for batch in self.unfinished():
            files.hold(batch.input_file_id)
            files.quota.add(sum(path.stat().st_size for path in self.folder(batch.id).glob("*.jsonl")))

    def folder(self, batch_id: str) -> Path:
        return self._folder / batch_id

    def __getitem__(self, batch_id: str) -> Batch:
        return self._batches[batch_id]

    def get(self, batch_id: str, owner: str) -> Batch:
        """Return an owner's batch. Raises `ApiError` if there is none: another owner's batch is reported as
        missing too.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise no_such_batch(batch_id)
        return batch

    def of(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def unfinished(self) -> list[Batch]:
        """Return the batches that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.status.has_ended]

    def num_by_status(self) -> Counter[BatchStatus]:
        return Counter(batch.status for batch in self._batches.values())

    async def create(self, request: BatchRequest, owner: str, endpoints: Collection[str]) -> Batch:
        """Create and store a batch to one of `endpoints`. Raises `ApiError`."""
        if request.endpoint not in endpoints:
            raise invalid_value(
                f"'endpoint' must be one of {', '.join(sorted(endpoints))}, got '{request.endpoint[:128]}'.",
                "endpoint",
            )
        file = self._files.get(request.input_file_id, owner)
        if file.purpose is not Purpose.BATCH:
            raise invalid_value(
                f"The purpose of a batch's input file must be 'batch', but file '{file.id}' has "
                f"'{file.purpose}'.",
                "input_file_id",
            )
        if len(self.unfinished()) >= self._settings.max_unfinished:
            raise overloaded(
                f"At most {self._settings.max_unfinished} batches may be unfinished at once. "
                "Please try again later.",
                retry_after=60,
            )
        now = self._now()
        expiry = request.output_expires_after
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
        # Shielded, as is the write in `cancel`: a client that disconnects leaves no half-created batch.
        await asyncio.shield(self._begin(batch))
        return batch

    async def cancel(self, batch_id: str, owner: str) -> Batch:
        """Stop running a batch's lines; its finished answers stay available. Raises `ApiError`."""
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
        """Replace a batch's state, in memory at once and on the disk before this returns."""
        self._batches[batch.id] = batch
        if batch.status.has_ended:
            self._files.release(batch.input_file_id)
        await self._disk.run(write_atomically, self.folder(batch.id) / "batch.json", _RECORD.dump_json(batch))

    def count(self, batch_id: str, journal: Journal) -> None:
        """Update a batch's counts and usage, in memory only: after a restart they come from the journal."""
        batch = self._batches[batch_id]
        counts = Counts(batch.counts.total, journal.num_completed, journal.num_failed)
        self._batches[batch_id] = replace(batch, counts=counts, usage=journal.usage)

    async def _begin(self, batch: Batch) -> None:
        await self._disk.run(self.folder(batch.id).mkdir, 0o700)
        await self.put(batch)
        self.changed.put_nowait(batch.id)
        # Above the limit, forget the oldest ended batches. Unfinished ones stay, even above the limit.
        ended_ids = [old.id for old in self._batches.values() if old.status.has_ended]
        num_surplus = max(0, len(self._batches) - self._settings.max_batches)
        for ended_id in ended_ids[:num_surplus]:
            del self._batches[ended_id]
            await self._disk.run(shutil.rmtree, self.folder(ended_id))


def no_such_batch(batch_id: str) -> ApiError:
    return ApiError(404, "batch_not_found", f"No batch found with id '{batch_id[:128]}'.", param="batch_id")


def _load_records(folder: Path) -> list[Batch]:
    """Return the records of all stored batches, and remove incomplete ones."""
    records = []
    for path in folder.iterdir():
        try:
            records.append(_RECORD.validate_json((path / "batch.json").read_bytes()))
        except FileNotFoundError:  # a crash interrupted its creation
            shutil.rmtree(path)
        except ValueError:
            logger.warning("%s is not a valid batch record; it is ignored and not deleted", path)
    return records

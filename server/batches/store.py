"""All batches and their states. A request that changes a state is answered when the state is on the disk.

The queue `BatchStore.changed` notifies the runner of batches that this server has created or cancelled.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from server.batches.batch import COMPLETION_WINDOW, Batch, BatchStatus, Counts, Usage, new_batch_id
from server.batches.disk import Disk, private, write_atomically
from server.batches.files import DEFAULT_LIFETIME, FileStore, Purpose
from server.batches.journal import JOURNAL_FILES, Journal
from server.batches.limits import BatchLimits
from server.http.errors import ApiError, conflict, invalid_value, overloaded
from server.protocol.batches import BatchRequest

logger: Final = logging.getLogger(__name__)

_RECORD: Final = TypeAdapter(Batch)
_NO_USAGE: Final = Usage()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the lines of a batch are, by its journal."""

    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    usage: Usage = _NO_USAGE


_PROGRESS: Final = TypeAdapter(Progress)


class BatchStore:
    """The batches of all owners and all servers. Lookups run on the event loop, writes in the disk's thread.

    A batch's input file is not deleted before the batch has ended.
    """

    def __init__(self, disk: Disk, files: FileStore, limits: BatchLimits, now: Callable[[], float]) -> None:
        """Remove incomplete batches that a crash left. The disk's first transaction reads the others."""
        self._disk = disk
        self._files = files
        self._limits = limits
        self._now = now
        self._folder = disk.folder("batches")
        # Replaced by the disk's thread, never changed, so that the event loop may read it at any time.
        self._batches: dict[str, Batch] = {}
        self._progress: dict[str, Progress] = {}  # of unfinished batches that this server runs or ran
        self._others: dict[str, Progress] = {}  # of unfinished batches, as the servers that run them wrote it
        self._written: dict[str, Progress] = {}  # by this server
        self._last_changes: dict[str, float] = {}  # Unix seconds, of unfinished batches at any server
        self.changed: asyncio.Queue[str] = asyncio.Queue()  # ids of new and cancelled batches
        files.read_ids = lambda: {batch.input_file_id for batch in self.unfinished()}
        files.quota.sources.append(
            lambda: sum(self._progress_of(batch.id).num_bytes for batch in self.unfinished())
        )
        disk.change_now(self._clean)
        disk.register(self._read)

    def folder(self, batch_id: str) -> Path:
        return self._folder / batch_id

    def __getitem__(self, batch_id: str) -> Batch:
        return self._counted(self._batches[batch_id])

    def _counted(self, batch: Batch) -> Batch:
        """Return the batch with its counts and usage so far."""
        if batch.is_sealed or batch.status.has_ended:
            return batch
        progress = self._progress_of(batch.id)
        counts = Counts(batch.counts.total, progress.num_completed, progress.num_failed)
        return replace(batch, counts=counts, usage=progress.usage)

    def get(self, batch_id: str, owner: str) -> Batch:
        """Return an owner's batch. Raises `ApiError` if there is none: another owner's batch is reported as
        missing too.
        """
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise no_such_batch(batch_id)
        return self._counted(batch)

    def get_unfinished(self, batch_id: str) -> Batch | None:
        """Return a batch, or None if it has ended or another server has deleted it."""
        batch = self._batches.get(batch_id)
        return None if batch is None or batch.status.has_ended else self._counted(batch)

    def of(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the oldest first."""
        return [self._counted(batch) for batch in self._batches.values() if batch.owner == owner]

    def unfinished(self) -> list[Batch]:
        """Return the batches that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.status.has_ended]

    def num_by_status(self) -> Counter[BatchStatus]:
        return Counter(batch.status for batch in self._batches.values())

    def stalled_seconds(self) -> float:
        """Return the time since the last answer or new state of the unfinished batch where it is longest."""
        changes = list(self._last_changes.values())
        return max(0.0, time.time() - min(changes)) if changes else 0.0  # 0 if the clock was set back

    async def refresh(self) -> None:
        """Read what other servers have done, and write for them how far this server is."""
        await self._disk.run(self._refresh)

    async def create(self, request: BatchRequest, owner: str, endpoints: Collection[str]) -> Batch:
        """Create and store a batch to one of `endpoints`. Raises `ApiError`."""
        if request.endpoint not in endpoints:
            raise invalid_value(
                f"'endpoint' must be one of {', '.join(sorted(endpoints))}, got '{request.endpoint[:128]}'.",
                "endpoint",
            )
        batch = await self._disk.change(self._create, request, owner)
        self.changed.put_nowait(batch.id)
        return batch

    async def cancel(self, batch_id: str, owner: str) -> Batch:
        """Stop running a batch's lines; its finished answers stay available. Raises `ApiError`."""

        def cancelled(batch: Batch) -> Batch | None:
            if batch.status is BatchStatus.CANCELLING:
                return None
            if not batch.status.may_run:
                raise conflict(
                    "batch_not_cancellable",
                    f"Cannot cancel a batch with status '{batch.status}'.",
                    "batch_id",
                )
            return replace(batch.entered(BatchStatus.CANCELLING, self._now()), ending=BatchStatus.CANCELLED)

        await self.refresh()
        self.get(batch_id, owner)
        batch = await self.update(batch_id, cancelled)
        if batch is None:
            raise no_such_batch(batch_id)
        self.changed.put_nowait(batch_id)
        return batch

    async def update(self, batch_id: str, change: Callable[[Batch], Batch | None]) -> Batch | None:
        """Replace a batch's state by what `change` makes of it, unless that is None. On the disk before this
        returns. Returns the batch, or None if another server has deleted it.
        """
        return await self._disk.change(self._update, batch_id, change)

    def count(self, batch_id: str, journal: Journal) -> None:
        """Update a batch's counts and usage, in memory only: after a restart they come from the journal."""
        self._progress[batch_id] = Progress(
            journal.num_completed, journal.num_failed, journal.num_bytes, journal.usage
        )

    def _progress_of(self, batch_id: str) -> Progress:
        return self._progress.get(batch_id) or self._others.get(batch_id) or Progress()

    # In the disk's thread

    def _refresh(self) -> None:
        self._disk.read_now()
        unfinished = [batch.id for batch in self.unfinished()]
        self._last_changes = {batch_id: self._last_change(batch_id) for batch_id in unfinished}
        self._others = {
            batch_id: progress
            for batch_id in unfinished
            if batch_id not in self._progress
            and (progress := _load_progress(self._progress_path(batch_id)) or self._others.get(batch_id))
        }
        for batch_id, progress in list(self._progress.items()):
            if batch_id not in unfinished:
                self._progress.pop(batch_id)
                self._written.pop(batch_id, None)
            elif progress != self._written.get(batch_id):
                # Not atomically: a server that reads a part of it keeps the old one, until the next refresh.
                try:
                    with open(self._progress_path(batch_id), "wb", opener=private) as file:
                        file.write(_PROGRESS.dump_json(progress))
                except OSError as error:  # only other servers read it; the next refresh tries again
                    logger.warning("the progress of batch %s could not be written: %s", batch_id, error)
                else:
                    self._written[batch_id] = progress

    def _last_change(self, batch_id: str) -> float:
        """Return when its record or its journal was last written. A restart of the server changes neither."""
        times = []
        for name in ("batch.json", *JOURNAL_FILES):
            with contextlib.suppress(OSError):  # missing, deleted, or a stale handle of a network disk
                times.append((self.folder(batch_id) / name).stat().st_mtime)
        # Without any, the batch is mostly one that another server has just deleted.
        return max(times, default=self._last_changes.get(batch_id, time.time()))

    def _progress_path(self, batch_id: str) -> Path:
        return self.folder(batch_id) / "progress.json"

    # In the disk's thread, in a transaction

    def _read(self) -> None:
        """Read the records of new and unfinished batches, and forget those that are gone."""
        batches = []
        for path in self._folder.iterdir():
            known = self._batches.get(path.name)
            is_final = known is not None and known.status.has_ended
            batch = known if is_final else _load_record(path / "batch.json")
            if batch is not None:
                batches.append(batch)
        batches.sort(key=lambda batch: (batch.created_at, batch.id))
        self._batches = {batch.id: batch for batch in batches}

    def _clean(self) -> None:
        for path in self._folder.iterdir():
            if not (path / "batch.json").exists():
                shutil.rmtree(path)

    def _create(self, request: BatchRequest, owner: str) -> Batch:
        file = self._files.get(request.input_file_id, owner)
        if file.purpose is not Purpose.BATCH:
            raise invalid_value(
                f"The purpose of a batch's input file must be 'batch', but file '{file.id}' has "
                f"'{file.purpose}'.",
                "input_file_id",
            )
        if len(self.unfinished()) >= self._limits.max_unfinished:
            raise overloaded(
                f"At most {self._limits.max_unfinished} batches may be unfinished at once. "
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
        self.folder(batch.id).mkdir(0o700)
        self._write(batch)
        self._forget_oldest()
        return batch

    def _forget_oldest(self) -> None:
        """Above the limit, forget the oldest ended batches. Unfinished ones stay, even above the limit."""
        ended_ids = [batch.id for batch in self._batches.values() if batch.status.has_ended]
        num_surplus = max(0, len(self._batches) - self._limits.max_batches)
        for ended_id in ended_ids[:num_surplus]:
            self._batches = {key: batch for key, batch in self._batches.items() if key != ended_id}
            shutil.rmtree(self.folder(ended_id))

    def _update(self, batch_id: str, change: Callable[[Batch], Batch | None]) -> Batch | None:
        if batch_id not in self._batches:
            return None
        changed = change(self[batch_id])
        if changed is not None:
            self._write(changed)
        return self[batch_id]

    def _write(self, batch: Batch) -> None:
        write_atomically(self.folder(batch.id) / "batch.json", _RECORD.dump_json(batch))
        self._batches = {**self._batches, batch.id: batch}


def no_such_batch(batch_id: str) -> ApiError:
    return ApiError(404, "batch_not_found", f"No batch found with id '{batch_id[:128]}'.", param="batch_id")


def _load_record(path: Path) -> Batch | None:
    try:
        return _RECORD.validate_json(path.read_bytes())
    except FileNotFoundError:  # a crash interrupted its creation; the next start removes it
        return None
    except ValueError:
        logger.warning("%s is not a valid batch record; it is ignored and not deleted", path)
        return None


def _load_progress(path: Path) -> Progress | None:
    """Return what another server has written; None if that is nothing, or only a part of it."""
    try:
        return _PROGRESS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None

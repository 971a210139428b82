"""Moves batches from state to state and runs their lines, a bounded number at a time over all batches.

Servers that share a folder run each batch once: a lock on a file of the batch says whose it is. A server that
dies loses its locks, and the others try each lock once a second.

Each state's step can be interrupted anywhere and run again, after a cancellation, a full disk or a crash: the
journal holds the ids of the answered lines.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from server.batches.batch import Batch, BatchStatus, Counts
from server.batches.disk import DiskFullError, try_lock
from server.batches.dispatch import Dispatcher
from server.batches.files import Purpose, StoredFile, new_file_id
from server.batches.journal import Journal
from server.batches.lines import Inspection, inspect_input, read_task
from server.batches.service import Batches
from server.http.json_response import ascii_json

logger: Final = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 1.0  # seconds between two looks at expiry times and at what other servers have done
RETRY_INTERVAL: Final = 5.0  # seconds before a retry after an error of the disk or a full quota
MAX_RETRY_INTERVAL: Final = 60.0  # seconds; each failure in a row doubles the time
EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class LineObserver(Protocol):
    """Is notified of each line written to a journal."""

    def answered_line(self, *, is_error: bool) -> None: ...

    def failed_write(self) -> None:
        """The disk is full or broken, and the batch waits."""
        ...


class BatchRunner:
    """Runs all unfinished batches.

    Run `run` in a task. To shut down, call `drain` before the engine drains; then cancel and await the task.
    """

    def __init__(self, batches: Batches, dispatcher: Dispatcher, observer: LineObserver) -> None:
        self._disk = batches.disk
        self._files = batches.files
        self._store = batches.store
        self._limits = batches.limits
        self._now = batches.now
        self._dispatcher = dispatcher
        self._observer = observer
        self._draining = asyncio.Event()
        self._batches: dict[str, asyncio.Task[None]] = {}  # one task for each unfinished batch, by id
        # The current step of each of them that this server holds, by id, and the state that it began in.
        self._steps: dict[str, tuple[BatchStatus, asyncio.Task[None]]] = {}
        self._num_lines = 0
        self._line_slots = asyncio.Semaphore(0)

    async def run(self, num_lines: int) -> None:
        """Run the unfinished batches and all new ones, with at most `num_lines` lines in progress at once."""
        self._num_lines = num_lines
        self._line_slots = asyncio.Semaphore(num_lines)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep_periodically())
            while True:
                batch_id = await self._store.changed.get()
                if batch_id in self._steps:
                    status, step = self._steps[batch_id]
                    batch = self._store.get_unfinished(batch_id)
                    if batch is None or batch.status is not status:
                        # The batch was cancelled or has expired: its task goes on with the new state's step.
                        step.cancel()
                elif batch_id not in self._batches and self._may_run(batch_id):
                    self._batches[batch_id] = group.create_task(self._try_batch(batch_id))

    def _may_run(self, batch_id: str) -> bool:
        return self._store.get_unfinished(batch_id) is not None and not self._draining.is_set()

    def drain(self) -> None:
        """Start no more lines; those in progress may complete."""
        self._draining.set()

    async def sweep(self) -> None:
        """Read what other servers have done, end the expired batches and remove the expired files."""
        await self._store.refresh()
        for batch in self._store.unfinished():
            if self._has_expired(batch):
                try:
                    await self._store.update(batch.id, self._expired)
                except (OSError, DiskFullError):  # it must not hide the later ones
                    logger.exception("batch %s could not expire; retrying", batch.id)
            self._store.changed.put_nowait(batch.id)
        await self._files.expire()

    def _has_expired(self, batch: Batch) -> bool:
        return batch.status.may_run and batch.expires_at <= self._now()

    def _expired(self, batch: Batch) -> Batch | None:
        if not self._has_expired(batch):
            return None
        return replace(batch.entered(BatchStatus.FINALIZING, self._now()), ending=BatchStatus.EXPIRED)

    async def _sweep_periodically(self) -> None:
        while True:
            try:
                await self.sweep()
            except Exception:
                logger.exception("the folder of batches could not be read or changed; retrying")
            await asyncio.sleep(SWEEP_INTERVAL)

    # One batch

    async def _try_batch(self, batch_id: str) -> None:
        """Run a batch, unless another server does."""
        locks: list[int] = []  # one descriptor; none if another server holds the lock

        def lock() -> None:
            descriptor = try_lock(self._store.folder(batch_id) / "lock")
            if descriptor is not None:
                locks.append(descriptor)

        def unlock() -> None:
            for descriptor in locks:
                os.close(descriptor)

        try:
            try:
                await self._disk.run(lock)
                if locks:
                    await self._store.refresh()  # its last server may have changed it, and even ended it
                    await self._run_batch(batch_id)
            finally:
                # The last write of a cancelled task may still run in the disk's thread. The lock is freed
                # behind it, so that the next server reads that write.
                await asyncio.shield(self._disk.run(unlock))
        except Exception:  # it must not stop the other batches
            logger.exception("batch %s could not be taken; retrying", batch_id)
        finally:
            self._steps.pop(batch_id, None)
            del self._batches[batch_id]

    async def _run_batch(self, batch_id: str) -> None:
        """Run a batch's steps until it has ended or the server drains. A failed step is retried."""
        interval = RETRY_INTERVAL
        while (batch := self._store.get_unfinished(batch_id)) is not None and not self._draining.is_set():
            step = asyncio.create_task(self._step(batch))
            self._steps[batch_id] = batch.status, step
            # `wait` does not raise the step's exceptions, so a cancelled step does not cancel this task.
            try:
                await asyncio.wait({step})
            finally:
                step.cancel()
                await asyncio.wait({step})
            error = None if step.cancelled() else step.exception()
            if error is None:
                interval = RETRY_INTERVAL
                continue
            self._report(batch_id, error, interval)
            await self._pause(interval)
            interval = min(2 * interval, MAX_RETRY_INTERVAL)

    def _report(self, batch_id: str, error: BaseException, interval: float) -> None:
        """Log why a step failed. A full disk needs no traceback."""
        full, others = _split(error, DiskFullError)
        if full or _split(error, OSError)[0]:
            self._observer.failed_write()
        if full and not others:
            logger.error("batch %s waits %g s: %s", batch_id, interval, full[0])
        else:
            logger.error("batch %s failed and is retried in %g s", batch_id, interval, exc_info=error)

    async def _step(self, batch: Batch) -> None:
        match batch.status:
            case BatchStatus.VALIDATING:
                await self._validate(batch)
            case BatchStatus.IN_PROGRESS:
                await self._answer_lines(batch)
            case _:
                await self._finalize(batch)

    async def _validate(self, batch: Batch) -> None:
        found = await self._inspect(batch, frozenset())
        if found.errors:
            await self._leave(batch, BatchStatus.FAILED, errors=tuple(found.errors))
        else:
            await self._leave(
                batch, BatchStatus.IN_PROGRESS, counts=Counts(found.num_lines), model=found.model
            )

    async def _answer_lines(self, batch: Batch) -> None:
        journal = await self._journal(batch)
        found = await self._inspect(batch, await self._disk.run(journal.custom_ids))
        self._store.count(batch.id, journal)
        # A batch has no more tasks than there are line slots, and those that pause count too. So batches take
        # turns in the queue for slots, and a batch of thousands of lines does not have thousands of tasks.
        room = asyncio.Semaphore(self._num_lines)
        async with asyncio.TaskGroup() as group:
            for start in found.unanswered:
                await room.acquire()
                if self._draining.is_set():
                    break
                answering = group.create_task(self._answer(batch, journal, start))
                answering.add_done_callback(lambda _: room.release())
        if not self._draining.is_set():
            await self._leave(batch, BatchStatus.FINALIZING)

    async def _leave(self, batch: Batch, status: BatchStatus, **changes: Any) -> None:
        """Move the batch to `status`, unless it was cancelled or has expired in the meantime."""

        def moved(current: Batch) -> Batch | None:
            if current.status is not batch.status:
                return None
            return replace(current.entered(status, self._now()), **changes)

        await self._store.update(batch.id, moved)

    async def _finalize(self, batch: Batch) -> None:
        """Turn the journal into the output and error files, and end the batch."""
        if not batch.is_sealed:
            batch = await self._seal(batch)
        folder = self._store.folder(batch.id)
        created_at = self._now()
        # After a crash in this loop, the ids are the same: a file that was made before is not made again.
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            path = folder / f"{kind}.jsonl"
            if file_id is not None and file_id not in self._files:
                expires_at = created_at + batch.output_lifetime
                num_bytes = path.stat().st_size
                name = f"{batch.id}_{kind}.jsonl"
                file = StoredFile(
                    file_id, batch.owner, name, Purpose.BATCH_OUTPUT, num_bytes, created_at, expires_at
                )
                await self._files.keep(file, path)
            await self._disk.run(partial(path.unlink, missing_ok=True))
        await self._put(batch.entered(batch.ending, self._now()))

    async def _seal(self, batch: Batch) -> Batch:
        """Complete the journal, and store the final counts, usage and file ids. Returns the sealed batch."""
        journal = await self._journal(batch)
        num_lines = batch.counts.total
        # An expired batch reports an error for each line without an answer. Its total may still be 0, if it
        # expired while it was being validated.
        if batch.ending is BatchStatus.EXPIRED:
            found = await self._inspect(batch, await self._disk.run(journal.custom_ids))
            num_lines = found.num_lines
            path = self._files.content_of(batch.input_file_id)
            ids = await asyncio.to_thread(
                lambda: [read_task(path, start).custom_id for start in found.unanswered]
            )
            lines = [_line(custom_id, None, EXPIRED) for custom_id in ids]
            await self._record(batch, journal, lines, is_error=True)
        batch = replace(
            batch,
            is_sealed=True,
            counts=Counts(num_lines, journal.num_completed, journal.num_failed),
            usage=journal.usage,
            output_file_id=new_file_id() if journal.num_completed else None,
            error_file_id=new_file_id() if journal.num_failed else None,
        )
        await self._put(batch)
        return batch

    async def _put(self, batch: Batch) -> None:
        """Replace the state of a batch whose lines run no more: nothing else changes it."""
        await self._store.update(batch.id, lambda _: batch)

    async def _journal(self, batch: Batch) -> Journal:
        return await self._disk.run(Journal, self._store.folder(batch.id))

    async def _inspect(self, batch: Batch, answered: frozenset[str] | set[str]) -> Inspection:
        limits = self._limits
        path = self._files.content_of(batch.input_file_id)
        return await asyncio.to_thread(
            inspect_input, path, batch.endpoint, limits.max_lines, limits.max_line_bytes, answered
        )

    # One line

    async def _answer(self, batch: Batch, journal: Journal, start: int) -> None:
        """Run a line until it has an answer, and write the answer to the journal.

        A line that has no answer when the server drains runs after the next start.
        """
        while not self._draining.is_set():
            async with self._line_slots:
                retry_after = await self._try_line(batch, journal, start)
            if retry_after is None:
                return
            await self._pause(retry_after)  # without a slot: other batches' lines need not wait

    async def _try_line(self, batch: Batch, journal: Journal, start: int) -> float | None:
        """Run a line once. Returns the seconds to wait before the next try, or None after an answer."""
        task = await asyncio.to_thread(read_task, self._files.content_of(batch.input_file_id), start)
        # Without room for the answer, do not spend compute on it.
        if self._draining.is_set() or self._files.quota.is_full:
            return RETRY_INTERVAL
        reply = await self._dispatcher.send(batch.endpoint, task, batch.owner)
        if not reply.is_answer:
            return reply.retry_after
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        is_error = reply.status != 200
        await self._record(batch, journal, [_line(task.custom_id, response, None)], is_error=is_error)
        return None

    async def _record(
        self, batch: Batch, journal: Journal, lines: Sequence[bytes], *, is_error: bool
    ) -> None:
        """Append lines to the journal, and count their bytes and number."""
        await self._disk.run(partial(journal.append, lines, is_error=is_error))
        self._store.count(batch.id, journal)
        for _ in lines:
            self._observer.answered_line(is_error=is_error)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the server drains."""
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            pass


def _split(error: BaseException, kind: type[Exception]) -> tuple[list[Exception], list[BaseException]]:
    """Return the errors of a kind in an error or a group of them, and the others."""
    if not isinstance(error, BaseExceptionGroup):
        return ([error], []) if isinstance(error, kind) else ([], [error])
    parts = [_split(each, kind) for each in error.exceptions]
    return [one for found, _ in parts for one in found], [one for _, rest in parts for one in rest]


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return a line of an output or error file."""
    return ascii_json(
        {
            "id": f"batch_req_{secrets.token_hex(16)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )

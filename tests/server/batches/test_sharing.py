"""Several servers with one folder: each sees the others' work, and each batch runs at one of them."""

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from server.batches import disk
from server.batches.batch import Batch, BatchStatus, Usage
from server.batches.disk import FolderError, try_lock
from server.batches.dispatch import Dispatcher
from server.batches.files import FileStore, StoredFile, new_file_id
from server.batches.journal import Journal
from server.batches.multipart import UploadForm
from server.batches.runner import BatchRunner
from server.batches.service import Batches
from server.batches.upload import Upload
from server.http.errors import ApiError
from tests.server.batches.inputs import DAY, Clock, batches_in, jsonl
from tests.server.batches.test_runner import LINES, Seen, Server, create, output, running, until, upload


async def test_each_server_sees_the_files_and_batches_of_the_others(tmp_path: Path) -> None:
    with batches_in(tmp_path, max_unfinished=2) as here, batches_in(tmp_path) as there:
        file = await upload(here, b"content")
        await there.store.refresh()
        assert there.files.get(file.id, "") == file
        assert there.files.content_of(file.id).read_bytes() == b"content"
        assert there.files.quota.num_used == len(b"content")
        # A change needs no refresh: it reads first.
        batch = await create(there, jsonl(LINES))
        await create(there, jsonl(LINES))
        with pytest.raises(ApiError, match="At most 2 batches"):
            await create(here, jsonl(LINES))
        with pytest.raises(ApiError, match="the input of a batch"):
            await here.files.delete(batch.input_file_id, "")
        await here.files.delete(file.id, "")
        await there.store.refresh()
        with pytest.raises(ApiError, match="No such File"):
            there.files.get(file.id, "")


async def test_a_batch_runs_at_one_server_and_is_seen_and_cancelled_at_all(tmp_path: Path) -> None:
    first, second = Server(), Server()
    with batches_in(tmp_path) as here, batches_in(tmp_path) as there:
        async with running(here, first, num_lines=1):
            batch = await create(here, jsonl(LINES))
            await until(lambda: here.store[batch.id].counts.completed >= 3)
            first.may_answer.clear()
            # Not earlier: its first sweep could take the new batch before the server that created it.
            async with running(there, second):
                await until(lambda: batch.id in [each.id for each in there.store.unfinished()])
                await until(lambda: there.store[batch.id].counts.completed >= 3)
                assert there.store[batch.id].usage.output_tokens >= 9
                await there.store.cancel(batch.id, "")
                await until(lambda: here.store[batch.id].status is BatchStatus.CANCELLED)
                await until(lambda: there.store[batch.id].status is BatchStatus.CANCELLED)
            right, wrong = output(there, batch)
            assert 3 <= len(right) < 10
            assert wrong == {}
    assert not second.asked


async def test_a_batch_of_a_server_that_is_gone_goes_on_at_another(tmp_path: Path) -> None:
    first, second = Server(), Server()
    with batches_in(tmp_path) as here, batches_in(tmp_path) as there:
        async with running(there, second):
            async with running(here, first, num_lines=1):
                batch = await create(here, jsonl(LINES))
                await until(lambda: here.store[batch.id].counts.completed >= 3)
                first.may_answer.clear()
            # Its locks are free, as after its death, and its line in progress has no answer.
            await until(lambda: there.store.num_by_status()[BatchStatus.COMPLETED] == 1)
        right, wrong = output(there, batch)
        assert (len(right), wrong) == (10, {})
        assert there.store[batch.id].usage == Usage(20, 0, 30)
        assert 10 <= (first.asked + second.asked).total() <= 11


@pytest.mark.parametrize(
    ("name", "work"),
    [("server.batches.runner.try_lock", try_lock), ("server.batches.journal.Journal.append", Journal.append)],
    ids=["lock", "append"],
)
async def test_a_stopped_server_frees_a_batch_after_its_work_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, work: Any
) -> None:
    is_working, may_end = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        result = work(*arguments, **options)
        is_working.set()
        may_end.wait(10)
        return result

    with batches_in(tmp_path) as here, batches_in(tmp_path) as there:
        batch = await create(here, jsonl(LINES))
        path = here.store.folder(batch.id) / "lock"
        with monkeypatch.context() as patch:
            patch.setattr(name, slow)
            task = asyncio.create_task(BatchRunner(here, Dispatcher(Server()), Seen()).run(2))
            await until(is_working.is_set)
            task.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            early = try_lock(path)
            may_end.set()
            await asyncio.gather(task, return_exceptions=True)
        assert early is None
        late = try_lock(path)
        assert late is not None
        os.close(late)
        async with running(there, Server()) as (runner, _):
            await runner.sweep()
            await until(lambda: there.store[batch.id].status is BatchStatus.COMPLETED)
        assert len(output(there, batch)[0]) == there.store[batch.id].counts.total == 10


async def test_progress_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    with batches_in(tmp_path) as here, batches_in(tmp_path) as there:
        batch = await create(here, jsonl(LINES))
        path = here.store.folder(batch.id) / "progress.json"
        journal = Journal(here.store.folder(batch.id))
        journal.append([b'{"custom_id": "r0"}'], is_error=False)
        here.store.count(batch.id, journal)
        path.mkdir()
        await here.store.refresh()
        path.rmdir()
        await here.store.refresh()
        await there.store.refresh()
        assert there.store[batch.id].counts.completed == 1
        path.unlink()
        path.mkdir()  # it cannot be read
        await there.store.refresh()
        assert there.store[batch.id].counts.completed == 1
        path.rmdir()
        path.write_bytes(b"")  # the disk is full: the old counts stay
        await there.store.refresh()
        assert there.store[batch.id].counts.completed == 1


async def test_a_batch_that_stalls_beside_a_busy_one_is_seen_at_all_servers(tmp_path: Path) -> None:
    with batches_in(tmp_path) as here, batches_in(tmp_path) as there:
        assert there.store.stalled_seconds() == 0
        stalled, busy = await create(here, jsonl(LINES)), await create(here, jsonl(LINES))
        journals = {batch.id: Journal(here.store.folder(batch.id)) for batch in (stalled, busy)}
        an_hour_ago = time.time() - 3600
        for path in here.store.folder(stalled.id).iterdir():
            os.utime(path, (an_hour_ago, an_hour_ago))
        journals[busy.id].append([b'{"custom_id": "r0"}'], is_error=False)
        await there.store.refresh()
        assert 3600 <= there.store.stalled_seconds() < 3660
        journals[stalled.id].append([b'{"custom_id": "r0"}'], is_error=True)
        await there.store.refresh()
        assert there.store.stalled_seconds() < 60
        await here.store.update(busy.id, lambda batch: batch.entered(BatchStatus.FAILED, 0))
        for path in here.store.folder(busy.id).iterdir():
            os.utime(path, (an_hour_ago, an_hour_ago))
        await there.store.refresh()
        assert there.store.stalled_seconds() < 60  # one that has ended does not count


async def test_the_time_since_the_last_change_is_never_negative(tmp_path: Path) -> None:
    with batches_in(tmp_path) as here:
        batch = await create(here, jsonl(LINES))
        later = time.time() + 3600  # written before the clock was set back
        for path in here.store.folder(batch.id).iterdir():
            os.utime(path, (later, later))
        await here.store.refresh()
        assert here.store.stalled_seconds() == 0


async def test_a_file_that_vanishes_keeps_the_time_of_the_last_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def stale(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == batch.id:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    with batches_in(tmp_path) as here:
        batch = await create(here, jsonl(LINES))
        an_hour_ago = time.time() - 3600
        for path in here.store.folder(batch.id).iterdir():
            os.utime(path, (an_hour_ago, an_hour_ago))
        await here.store.refresh()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stale)
            await here.store.refresh()
        assert 3600 <= here.store.stalled_seconds() < 3660


async def test_a_batch_that_cannot_expire_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with batches_in(tmp_path, clock.now) as here:
        first, second = await create(here, jsonl(LINES)), await create(here, jsonl(LINES))
        clock.time += DAY
        update = here.store.update

        async def fail_first(batch_id: str, change: Any) -> Batch | None:
            if batch_id == first.id:
                raise OSError(errno.EIO, "an error of the test")
            return await update(batch_id, change)

        with monkeypatch.context() as patch:
            patch.setattr(here.store, "update", fail_first)
            await BatchRunner(here, Dispatcher(Server()), Seen()).sweep()
        assert here.store[first.id].status is BatchStatus.VALIDATING
        assert here.store[second.id].status is BatchStatus.FINALIZING  # on its way to expired


async def delete(batches: Batches, batch: Batch) -> None:
    """End a batch, and make the server, which stores one batch, delete it for a new one."""
    await batches.store.update(batch.id, lambda batch: batch.entered(BatchStatus.FAILED, 0))
    await create(batches, jsonl(LINES))
    assert not batches.store.folder(batch.id).exists()


async def test_changes_of_a_batch_that_another_server_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with batches_in(tmp_path, clock.now) as here, batches_in(tmp_path, max_batches=1) as there:
        cancelled = await create(here, jsonl(LINES))
        refresh, batch = here.store.refresh, cancelled

        async def refresh_too_early() -> None:
            await refresh()
            await delete(there, batch)

        monkeypatch.setattr(here.store, "refresh", refresh_too_early)
        with pytest.raises(ApiError, match="No batch found") as missing:
            await here.store.cancel(cancelled.id, "")
        assert missing.value.status == 404
        batch = await create(here, jsonl(LINES))
        clock.time += DAY
        await BatchRunner(here, Dispatcher(Server()), Seen()).sweep()
        assert batch.id not in [each.id for each in here.store.of("")]


async def test_a_batch_that_cannot_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batches_in(tmp_path) as here, batches_in(tmp_path, max_batches=1) as there:
        deleted, last = await create(here, jsonl(LINES)), await create(here, jsonl(LINES))
        refresh, num_refreshed = here.store.refresh, 0

        async def refresh_late() -> None:
            nonlocal num_refreshed
            num_refreshed += 1
            match num_refreshed:
                case 1:
                    raise RuntimeError("an error of the test, in the sweep")
                case 2:
                    await delete(there, deleted)
                case 3:
                    raise RuntimeError("an error of the test, of a batch")
            await refresh()

        monkeypatch.setattr(here.store, "refresh", refresh_late)
        async with running(here, Server()):
            await until(lambda: here.store[last.id].status is BatchStatus.COMPLETED)
        assert num_refreshed >= 4


async def test_a_server_that_starts_leaves_the_uploads_of_the_others(tmp_path: Path) -> None:
    with batches_in(tmp_path) as here:
        dead = here.files.draft_path(new_file_id())
        dead.write_bytes(b"of a process that died")
        async with Upload(here.disk, here.files, 100, "") as going:
            await going._buffer_content(b"x")
            await going._write()
            with batches_in(tmp_path):
                assert [path.suffix for path in dead.parent.iterdir()] == [".draft"]
                assert not dead.exists()
        assert list(dead.parent.iterdir()) == []


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
)


async def receive(going: Upload) -> UploadForm:
    async def pieces() -> AsyncIterator[bytes]:
        yield FORM

    return await going.receive(Headers({"content-type": "multipart/form-data; boundary=b"}), pieces())


async def test_a_server_that_starts_leaves_an_upload_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batches_in(tmp_path) as here:
        keep = here.files.keep

        async def keep_late(file: StoredFile, source: Path) -> None:
            with batches_in(tmp_path):
                await keep(file, source)

        monkeypatch.setattr(here.files, "keep", keep_late)
        async with Upload(here.disk, here.files, 100, "") as going:
            file = await going.keep(await receive(going), here.now())
        path = here.files.content_of(file.id)
        assert path.read_bytes() == b"x"
        assert here.files.quota.num_used == 1
        lock = try_lock(path)
        assert lock is not None
        os.close(lock)


async def test_an_upload_that_cannot_be_stored_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "an error of the test")

    with batches_in(tmp_path) as here:
        monkeypatch.setattr(FileStore, "_keep", fail)
        with pytest.raises(OSError, match="of the test"):
            async with Upload(here.disk, here.files, 100, "") as going:
                await going.keep(await receive(going), here.now())
        assert list((here.disk.root / "files").iterdir()) == []
        assert here.files.quota.num_used == 0


def test_a_folder_that_another_version_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_TIMEOUT", 0.1)
    folder = tmp_path / "kept"
    folder.mkdir()
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FolderError, match="cannot be locked"):
            batches_in(tmp_path)
    with batches_in(tmp_path):
        pass

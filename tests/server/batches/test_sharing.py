"""Several servers with one folder: each sees the others' work, and each batch runs at one of them."""

import fcntl
from pathlib import Path

import pytest

from server.batches import disk
from server.batches.batch import BatchStatus, Usage
from server.batches.disk import FolderError
from server.batches.files import new_file_id
from server.batches.service import Batches
from server.batches.upload import Upload
from server.http.errors import ApiError
from tests.server.batches.inputs import jsonl, limits
from tests.server.batches.test_runner import LINES, Server, create, output, running, until, upload


async def test_each_server_sees_the_files_and_batches_of_the_others(tmp_path: Path) -> None:
    with Batches(limits(tmp_path, max_unfinished=2)) as here, Batches(limits(tmp_path)) as there:
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
    with Batches(limits(tmp_path)) as here, Batches(limits(tmp_path)) as there:
        async with running(here, first, num_lines=1), running(there, second):
            batch = await create(here, jsonl(LINES))
            await until(lambda: here.store[batch.id].counts.completed >= 3)
            first.may_answer.clear()
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
    with Batches(limits(tmp_path)) as here, Batches(limits(tmp_path)) as there:
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


async def test_a_server_that_starts_leaves_the_uploads_of_the_others(tmp_path: Path) -> None:
    with Batches(limits(tmp_path)) as here:
        dead = here.files.draft_path(new_file_id())
        dead.write_bytes(b"of a process that died")
        async with Upload(here.disk, here.files, 100, "") as going:
            await going._buffer_content(b"x")
            await going._write()
            with Batches(limits(tmp_path)):
                assert [path.suffix for path in dead.parent.iterdir()] == [".draft"]
                assert not dead.exists()
        assert list(dead.parent.iterdir()) == []


def test_a_folder_that_another_version_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_TIMEOUT", 0.1)
    settings = limits(tmp_path)
    settings.folder.mkdir()
    with (settings.folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FolderError, match="cannot be locked"):
            Batches(settings)
    with Batches(settings):
        pass

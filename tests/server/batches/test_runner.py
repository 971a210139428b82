"""Batches from state to state over an application that is full, shuts down, fails or is late."""

import asyncio
import contextlib
import errno
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.batches.batch import Batch, BatchStatus, Usage
from server.batches.dispatch import Dispatcher
from server.batches.files import DEFAULT_LIFETIME, Purpose, StoredFile, new_file_id
from server.batches.journal import Journal
from server.batches.runner import BatchRunner
from server.batches.service import Batches
from server.http.errors import ApiError
from server.http.record import RequestRecord
from server.protocol.batches import BatchRequest
from tests.server.batches.inputs import CHAT, DAY, Clock, answers, batches_in, jsonl, line


class Server:
    """Answers each request with its custom id, once it may; `statuses` come before that."""

    def __init__(self) -> None:
        self.statuses: dict[str, list[int]] = {}
        self.retry_after = 0  # seconds
        self.asked: Counter[str] = Counter()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert RequestRecord.of(scope).is_background
        content = (await Request(scope, receive).json())["messages"][0]["content"]
        self.asked[content] += 1
        await self.may_answer.wait()
        statuses = self.statuses.get(content, [])
        await self._answer(content, statuses.pop(0) if statuses else 200)(scope, receive, send)

    def _answer(self, content: str, status: int) -> Response:
        return JSONResponse(
            {"said": content, "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
            status,
            headers={"Retry-After": str(self.retry_after)} if status != 200 else {},
        )


class Seen:
    def __init__(self) -> None:
        self.lines: Counter[bool] = Counter()
        self.num_failed_writes = 0

    def answered_line(self, *, is_error: bool) -> None:
        self.lines[is_error] += 1

    def failed_write(self) -> None:
        self.num_failed_writes += 1


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 (what is waited for happens in several places, some of them other threads)
            await asyncio.sleep(0)


async def upload(batches: Batches, content: bytes) -> StoredFile:
    file = StoredFile(
        new_file_id(),
        "",
        "input",
        Purpose.BATCH,
        len(content),
        batches.now(),
        batches.now() + DEFAULT_LIFETIME,
    )
    draft = batches.files.draft_path(file.id)
    draft.write_bytes(content)
    await batches.files.keep(file, draft)
    return file


async def create(batches: Batches, content: bytes) -> Batch:
    file = await upload(batches, content)
    request = BatchRequest(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return await batches.store.create(request, "", [CHAT])


def output(batches: Batches, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an ended batch's answers and errors."""
    ended = batches.store[batch.id]
    ids = (ended.output_file_id, ended.error_file_id)
    output, error = (
        {} if each is None else answers(batches.files.content_of(each).read_bytes()) for each in ids
    )
    assert (ended.counts.completed, ended.counts.failed) == (len(output), len(error))
    return output, error


@contextlib.asynccontextmanager
async def running(
    batches: Batches, server: Server, num_lines: int = 2
) -> AsyncIterator[tuple[BatchRunner, Seen]]:
    seen = Seen()
    runner = BatchRunner(batches, Dispatcher(server), seen)
    task = asyncio.create_task(runner.run(num_lines))
    yield runner, seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


LINES = [line(f"r{number}") for number in range(10)]


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    server = Server()
    server.statuses = {"Hello r3": [400], "Hello r5": [500]}
    with batches_in(tmp_path) as batches:
        async with running(batches, server) as (_, seen):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].status.has_ended)
        ended = batches.store[batch.id]
        assert ended.status is BatchStatus.COMPLETED
        assert list(ended.times) == [BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED]
        right, wrong = output(batches, batch)
    assert {name: answer["response"]["body"]["said"] for name, answer in right.items()} == {
        f"r{n}": f"Hello r{n}" for n in range(10) if n not in (3, 5)
    }
    assert {name: answer["response"]["status_code"] for name, answer in wrong.items()} == {
        "r3": 400,
        "r5": 500,
    }
    assert all(
        answer["error"] is None and answer["response"]["request_id"] for answer in (right | wrong).values()
    )
    assert seen.lines == {False: 8, True: 2}


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        ({}, Usage()),
        ({"prompt_tokens": 3, "total_tokens": 3}, Usage(3)),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(3, 1, 4, 2),
        ),
        (
            {
                "input_tokens": 3,
                "output_tokens": 4,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(3, 1, 4, 2),
        ),
        ({"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(3, 0, 4)),
    ],
)
def test_usage_by_the_names_of_every_endpoint(reported: dict[str, Any], usage: Usage) -> None:
    answer = {"response": {"body": {"usage": reported}}}
    assert Usage.of(answer) == usage
    assert Usage.of(answer) + usage == Usage(
        2 * usage.input_tokens, 2 * usage.cached_tokens, 2 * usage.output_tokens, 2 * usage.reasoning_tokens
    )
    assert Usage.of({"response": None, "error": {"code": "batch_expired"}}) == Usage()


async def test_a_request_refused_by_a_full_server_is_retried(tmp_path: Path) -> None:
    server = Server()
    server.statuses = {"Hello r1": [429, 503, 429], "Hello r2": [503]}
    with batches_in(tmp_path) as batches:
        async with running(batches, server):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].status.has_ended)
        right, wrong = output(batches, batch)
    assert (len(right), wrong) == (10, {})
    assert (server.asked["Hello r1"], server.asked["Hello r2"], server.asked["Hello r0"]) == (4, 2, 1)


async def test_lines_that_wait_for_their_keys_limit_do_not_hold_up_other_batches(tmp_path: Path) -> None:
    server = Server()
    server.statuses = {f"Hello r{number}": [429] for number in range(10)}
    server.retry_after = 3600
    with batches_in(tmp_path) as batches:
        async with running(batches, server, num_lines=2) as (runner, _):
            refused = await create(batches, jsonl(LINES))
            await until(lambda: server.asked.total() == 2)
            other = await create(batches, jsonl(line(f"s{number}") for number in range(10)))
            await until(lambda: batches.store[other.id].status is BatchStatus.COMPLETED)
            assert server.asked.total() == 12  # no more lines of the refused batch than slots
            runner.drain()
            await until(lambda: not runner._batches)
        assert server.asked.total() == 12
        assert batches.store[refused.id].status is BatchStatus.IN_PROGRESS


async def test_running_lines_are_limited_and_batches_take_turns(tmp_path: Path) -> None:
    server = Server()
    server.may_answer.clear()
    with batches_in(tmp_path) as batches:
        async with running(batches, server, num_lines=3):
            first = await create(batches, jsonl(LINES))
            await until(lambda: server.asked.total() == 3)
            second = await create(batches, jsonl(line(f"s{number}") for number in range(10)))
            await until(lambda: batches.store[second.id].status is BatchStatus.IN_PROGRESS)
            for _ in range(100):
                await asyncio.sleep(0)
            assert server.asked.total() == 3
            server.may_answer.set()
            await until(lambda: batches.store[second.id].status.has_ended)
            assert not batches.store[first.id].status.may_run or batches.store[first.id].counts.completed >= 8
            await until(lambda: batches.store[first.id].status.has_ended)


async def test_a_restart_neither_loses_nor_repeats_an_answer(tmp_path: Path) -> None:
    server = Server()
    with batches_in(tmp_path) as batches:
        async with running(batches, server, num_lines=1) as (runner, _):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].counts.completed >= 4)
            runner.drain()
        num_before = Journal(batches.store.folder(batch.id)).num_completed
        assert 4 <= num_before < 10
        assert batches.store[batch.id].status is BatchStatus.IN_PROGRESS
    with batches_in(tmp_path) as batches:
        with pytest.raises(ApiError, match="the input of a batch"):
            await batches.files.delete(batch.input_file_id, "")
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status.has_ended)
        right, wrong = output(batches, batch)
        assert (len(right), wrong) == (10, {})
        await batches.files.delete(batch.input_file_id, "")
        assert batches.store[batch.id].usage == Usage(20, 0, 30)
    assert server.asked.total() <= 11  # the line that was under way may be asked twice


class Dying:
    """`os.replace` of a process that dies: from a moment on, no file replaces another any more."""

    def __init__(self, num_before: int) -> None:
        self._replace, self._num_before = os.replace, num_before
        self.is_counting = False
        self.num_done = 0
        self.is_dead = False

    def __call__(self, source: Path, target: Path) -> None:
        self.is_dead = self.is_counting and self.num_done == self._num_before
        if self.is_dead:
            raise OSError(5, "a death of the test")
        self._replace(source, target)
        self.num_done += self.is_counting


NUM_REPLACES = 7  # of a batch's end: three states, and for each of two files its record and its content


@pytest.mark.parametrize("num_before", range(NUM_REPLACES + 1))
async def test_a_death_at_any_moment_of_the_end_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    server, dying = Server(), Dying(num_before)
    server.statuses = {"Hello r3": [400]}
    server.may_answer.clear()
    with batches_in(tmp_path) as batches, monkeypatch.context() as patch:
        patch.setattr("os.replace", dying)
        async with running(batches, server) as (runner, _):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: server.asked.total() == 2)
            dying.is_counting = True
            server.may_answer.set()
            await until(lambda: dying.is_dead or dying.num_done == NUM_REPLACES)
            runner.drain()
    assert dying.num_done == num_before
    with batches_in(tmp_path) as batches:
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status.has_ended)
        right, wrong = output(batches, batch)
        assert (len(right), list(wrong)) == (9, ["r3"])
        contents = list((tmp_path / "kept" / "files").glob("*.data"))
        assert len(contents) == 3
        assert batches.files.quota.num_used == sum(path.stat().st_size for path in contents)
        assert not list(batches.store.folder(batch.id).glob("*.jsonl"))
    assert server.asked.total() == 10


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_batch_above_its_completion_window_expires(tmp_path: Path, is_restarted: bool) -> None:
    server, clock = Server(), Clock()
    with batches_in(tmp_path, clock.now) as batches:
        async with running(batches, server, num_lines=1) as (runner, _):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].counts.completed >= 3)
            server.may_answer.clear()
            clock.time += DAY - 1
            await runner.sweep()
            assert batches.store[batch.id].status is BatchStatus.IN_PROGRESS
            if not is_restarted:
                clock.time += 1
                await runner.sweep()
                await until(lambda: batches.store[batch.id].status.has_ended)
    clock.time += 1
    with batches_in(tmp_path, clock.now) as batches:
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status.has_ended)
        assert batches.store[batch.id].status is BatchStatus.EXPIRED
        right, wrong = output(batches, batch)
    assert set(right) | set(wrong) == {f"r{number}" for number in range(10)}
    assert len(right) >= 3
    assert wrong
    assert {(answer["response"], answer["error"]["code"]) for answer in wrong.values()} == {
        (None, "batch_expired")
    }


async def test_a_cancelled_batch_keeps_its_answers_and_ends_at_once(tmp_path: Path) -> None:
    server = Server()
    with batches_in(tmp_path) as batches:
        async with running(batches, server, num_lines=1):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].counts.completed >= 3)
            server.may_answer.clear()
            cancelling = await batches.store.cancel(batch.id, "")
            assert cancelling.status is BatchStatus.CANCELLING
            await until(lambda: batches.store[batch.id].status is BatchStatus.CANCELLED)
            right, wrong = output(batches, batch)
            assert 3 <= len(right) < 10
            assert wrong == {}
            with pytest.raises(ApiError, match="Cannot cancel a batch with status 'cancelled'"):
                await batches.store.cancel(batch.id, "")


async def test_a_batch_that_never_ran_can_be_cancelled(tmp_path: Path) -> None:
    server = Server()
    with batches_in(tmp_path) as batches:
        batch = await create(batches, jsonl(LINES))
        await batches.store.cancel(batch.id, "")
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status is BatchStatus.CANCELLED)
        assert output(batches, batch) == ({}, {})
    assert not server.asked


async def test_files_expire_unless_a_batch_reads_them(tmp_path: Path) -> None:
    server, clock = Server(), Clock()
    server.may_answer.clear()
    with batches_in(tmp_path, clock.now) as batches:
        async with running(batches, server) as (runner, _):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: batches.store[batch.id].status is BatchStatus.IN_PROGRESS)
            path = batches.files.content_of(batch.input_file_id)
            clock.time += DEFAULT_LIFETIME
            await batches.files.expire()
            assert path.exists()
            with pytest.raises(ApiError, match="No such File"):
                batches.files.get(batch.input_file_id, "")
            await runner.sweep()
            await until(lambda: batches.store[batch.id].status is BatchStatus.EXPIRED)
            await runner.sweep()
            assert not path.exists()


async def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    server = Server()
    content = jsonl(LINES)
    with batches_in(tmp_path, max_file_storage=len(content)) as batches:
        batch = await create(batches, content)
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status is BatchStatus.IN_PROGRESS)
            for _ in range(100):
                await asyncio.sleep(0)
        assert not server.asked
    with batches_in(tmp_path) as batches:
        async with running(batches, server):
            await until(lambda: batches.store[batch.id].status is BatchStatus.COMPLETED)


async def test_ended_batches_are_forgotten_beyond_a_number(tmp_path: Path) -> None:
    with batches_in(tmp_path, max_batches=2) as batches:
        async with running(batches, Server()):
            made = []
            for _ in range(4):
                made.append(await create(batches, jsonl(LINES[:1])))
                await until(lambda: batches.store[made[-1].id].status.has_ended)
        assert [batch.id for batch in batches.store.of("")] == [batch.id for batch in made[-2:]]
    with batches_in(tmp_path) as batches:
        assert [batch.id for batch in batches.store.of("")] == [batch.id for batch in made[-2:]]


async def test_unfinished_batches_are_limited(tmp_path: Path) -> None:
    with batches_in(tmp_path, max_unfinished=2) as batches:
        for _ in range(2):
            await create(batches, jsonl(LINES))
        with pytest.raises(ApiError) as refused:
            await create(batches, jsonl(LINES))
        assert refused.value.status == 429


def test_an_unreadable_record_is_ignored(tmp_path: Path) -> None:
    with batches_in(tmp_path) as batches:
        files, folder = batches.files.content_of("file-x"), batches.store.folder("batch_x")
        folder.mkdir()
        for path in (files, files.with_suffix(".json"), folder / "batch.json"):
            path.write_text(json.dumps({"from": "a later version"}))
    with batches_in(tmp_path) as batches:
        assert batches.files.of("") == []
        assert batches.store.of("") == []
        assert files.exists()
        assert (folder / "batch.json").exists()


async def test_a_full_disk_lets_a_batch_wait_longer_and_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = True
    append, pauses = Journal.append, list[float]()

    def failing(journal: Journal, lines: Sequence[bytes], *, is_error: bool) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, lines, is_error=is_error)

    async def pause(_: BatchRunner, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(Journal, "append", failing)
    monkeypatch.setattr(BatchRunner, "_pause", pause)
    with batches_in(tmp_path) as batches:
        async with running(batches, Server()) as (_, seen):
            batch = await create(batches, jsonl(LINES))
            await until(lambda: len(pauses) >= 5)
            is_full = False
            await until(lambda: batches.store[batch.id].status is BatchStatus.COMPLETED)
        assert len(output(batches, batch)[0]) == len(LINES)
    assert pauses[:5] == [5, 10, 20, 40, 60]
    assert seen.num_failed_writes == len(pauses)
    waiting = [record for record in caplog.records if "waits" in record.message]
    assert len(waiting) == len(pauses)
    assert all(record.exc_info is None for record in waiting)

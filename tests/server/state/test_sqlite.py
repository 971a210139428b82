"""Stored responses in a file: they outlive the server, and a file that cannot be used is an error."""

import asyncio
import os
import signal
import sqlite3
import stat
from pathlib import Path

import openai
import pytest

from server.metrics.metrics import Metrics
from server.options.settings import StorageLimits
from server.state.interface import StateError, StoredResponse
from server.state.sqlite_state import SqliteResponses, SqliteState
from tests.e2e.process import serve

RESPONSE = StoredResponse("resp_1", b'{"id": "resp_1"}', b"[]")


class Observed:
    num_lost = 0

    def lost_state(self) -> None:
        self.num_lost += 1


async def test_responses_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    first = SqliteState(path, StorageLimits(), Metrics("demo"))
    assert await first.responses.put("me", RESPONSE)
    # As after a kill: the first one is not closed.
    second = SqliteState(path, StorageLimits(), Metrics("demo"))
    assert (second.responses.num_responses, second.responses.num_bytes) == (1, RESPONSE.num_bytes)
    assert await second.responses.get("me", "resp_1") == RESPONSE
    assert await second.responses.get("other", "resp_1") is None
    # Both use the file at once.
    assert await second.responses.delete("me", "resp_1")
    assert await first.responses.get("me", "resp_1") is None
    for file in os.scandir(tmp_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await first.close()
    await second.close()


async def test_a_response_expires_while_no_server_runs(tmp_path: Path) -> None:
    path, now = tmp_path / "responses.db", 1e9
    first = SqliteResponses(path, StorageLimits(ttl=60), Observed(), lambda: now)
    assert await first.put("me", RESPONSE)
    await first.close()
    now += 59
    second = SqliteResponses(path, StorageLimits(ttl=60), Observed(), lambda: now)
    assert await second.get("me", "resp_1") == RESPONSE
    now += 1
    assert await second.get("me", "resp_1") is None
    assert not await second.delete("me", "resp_1")
    assert second.num_responses == 0
    await second.close()


async def test_a_deleted_response_is_in_no_file(tmp_path: Path) -> None:
    store = SqliteResponses(tmp_path / "responses.db", StorageLimits(), Observed())
    for size in (1, 1000):  # in a page with others, and in pages of its own
        secret = StoredResponse("resp_2", b"secret body " * size, b"secret items " * size)
        assert await store.put("me", RESPONSE)
        assert await store.put("me", secret)
        assert b"secret" in contents(tmp_path)
        assert await store.delete("me", "resp_2")
        assert b"secret" not in contents(tmp_path)
        assert await store.get("me", "resp_1") == RESPONSE
    await store.close()


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_a_full_disk_stores_nothing_and_loses_nothing(tmp_path: Path) -> None:
    observed = Observed()
    store = SqliteResponses(tmp_path / "responses.db", StorageLimits(), observed)
    assert await store.put("me", RESPONSE)
    fill = "PRAGMA max_page_count = 1"  # SQLite takes the current size, and fails as on a full disk
    await asyncio.get_running_loop().run_in_executor(store._thread, store._connection.execute, fill)
    assert not await store.put("me", StoredResponse("resp_2", b"x" * 100_000, b"[]"))
    assert observed.num_lost == 1
    assert await store.get("me", "resp_1") == RESPONSE
    assert await store.get("me", "resp_2") is None
    await store.close()


async def test_a_read_writes_nothing(tmp_path: Path) -> None:
    now, observed = 1e9, Observed()
    store = SqliteResponses(tmp_path / "responses.db", StorageLimits(ttl=60), observed, lambda: now)
    assert await store.put("me", RESPONSE)
    now += 30
    assert await store.put("me", StoredResponse("resp_2", b"{}", b"[]"))
    now += 30  # the first one has expired, and cannot be deleted
    refuse = "PRAGMA query_only = ON"
    await asyncio.get_running_loop().run_in_executor(store._thread, store._connection.execute, refuse)
    with pytest.raises(StateError, match="readonly"):
        await store.delete("me", "resp_2")
    assert await store.get("me", "resp_1") is None
    assert await store.get("me", "resp_2") is not None
    assert observed.num_lost == 1
    await store.close()


async def test_a_file_that_another_process_has_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.state.sqlite_state.TIMEOUT", 0.1)
    path, observed = tmp_path / "responses.db", Observed()
    store = SqliteResponses(path, StorageLimits(), observed)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not await store.put("me", RESPONSE)
        with pytest.raises(StateError, match="locked"):
            await store.delete("me", "resp_1")
        assert await store.get("me", "resp_1") is None  # not locked
        other.execute("ROLLBACK")
    other.close()
    assert observed.num_lost == 2
    assert await store.put("me", RESPONSE)
    await store.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    path.write_text("text " * 1000)
    with pytest.raises(StateError, match=r"responses.db cannot be used: file is not a database"):
        SqliteState(path, StorageLimits(), Metrics("demo"))
    with pytest.raises(StateError, match="cannot be used"):
        SqliteState(tmp_path, StorageLimits(), Metrics("demo"))


@pytest.mark.long
def test_a_conversation_goes_on_after_a_kill(tmp_path: Path) -> None:
    options = ("--backend", "fake", "--state-url", f"sqlite://{tmp_path / 'responses.db'}")
    with serve(*options, log=tmp_path / "a") as server, client(server.url) as sdk:
        made = sdk.responses.create(model="snapserve-demo", input="Hello", max_output_tokens=8)
        os.kill(server.process.pid, signal.SIGKILL)
    with serve(*options, log=tmp_path / "b") as server, client(server.url) as sdk:
        assert sdk.responses.retrieve(made.id).output_text == made.output_text
        then = sdk.responses.create(
            model="snapserve-demo", input="And?", previous_response_id=made.id, max_output_tokens=8
        )
        assert then.previous_response_id == made.id
        assert server.metrics()["snapserve:stored_responses"] == 2
    (tmp_path / "text").write_text("text " * 1000)
    broken = ("--backend", "fake", "--state-url", f"sqlite://{tmp_path / 'text'}")
    with (
        pytest.raises(RuntimeError, match=r"--state-url: .*file is not a database"),
        serve(*broken, log=tmp_path / "c"),
    ):
        pass
    assert "Traceback" not in (tmp_path / "c").read_text()


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)

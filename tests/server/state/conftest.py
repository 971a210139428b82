"""A real Redis, which starts once, and the stores of responses that every test of them runs on."""

import asyncio
import contextlib
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from server.metrics.metrics import Metrics
from server.options.settings import StorageLimits
from server.state.interface import Responses, SharedState, StoredResponse
from server.state.memory import MemoryResponses
from server.state.redis_state import RedisState
from server.state.sqlite_state import SqliteState


def pytest_runtest_setup(item: pytest.Item) -> None:
    is_redis = item.get_closest_marker("redis") is not None
    if is_redis and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")


class RedisServer:
    """A Redis that keeps nothing on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"unix://{folder}/redis.sock"
        self.start()

    def start(self) -> None:
        socket = self._folder / "redis.sock"
        options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(["redis-server", *options], cwd=self._folder, stdout=log)
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.02)
        client.close()

    def empty(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def pause(self, seconds: float) -> None:
        self._process.send_signal(signal.SIGSTOP)
        threading.Timer(seconds, self._process.send_signal, (signal.SIGCONT,)).start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(redis_process: RedisServer) -> RedisServer:
    redis_process.empty()
    return redis_process


class Store:
    """A store of responses, for synchronous tests."""

    def __init__(self, runner: asyncio.Runner, store: Responses) -> None:
        self._run = runner.run
        self.store = store

    def put(self, owner: str, response: StoredResponse) -> bool:
        return self._run(self.store.put(owner, response))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._run(self.store.get(owner, response_id))

    def delete(self, owner: str, response_id: str) -> bool:
        return self._run(self.store.delete(owner, response_id))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def new_store(
    request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Store]]:
    """Make an empty store of the given limits: a test runs with each kind."""
    states: list[SharedState] = []
    path = tmp_path_factory.mktemp("state") / "responses.db"

    def new(**limits: Any) -> Store:
        if request.param == "memory":
            return Store(runner, MemoryResponses(StorageLimits(**limits)))
        if request.param == "sqlite":
            while states:
                runner.run(states.pop().close())
            if path.exists():  # emptied: a new file takes longer
                with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                    connection.execute("DELETE FROM responses")
            states.append(SqliteState(path, StorageLimits(**limits), Metrics("demo")))
            return Store(runner, states[-1].responses)
        process: RedisServer = request.getfixturevalue("redis_process")
        process.empty()
        states.append(RedisState(process.url, StorageLimits(**limits), Metrics("demo")))
        return Store(runner, states[-1].responses)

    yield new
    for state in states:
        runner.run(state.close())

"""A real server in a thread: uvicorn on a free port of the loopback, the engine's thread, and the fake backend, which a gate can hold."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn

from backends.clock import WallClock
from backends.fake import FakeBackend, fake_spec
from backends.interface import BackendError, BackendSpec, Batch, Feature
from scheduler.config import SchedulerConfig
from scheduler.messages import Add, Final
from scheduler.stats import StepRecord
from server.app import create_app
from server.async_engine import AsyncEngine
from server.renderer import Renderer
from server.settings import ServerSettings

DEMO_MODEL = Path(__file__).parents[2] / "server" / "demo_model"
VOCAB_SIZE = 2758  # of the demo model's tokenizer
MODEL = "demo"


def settings(**changes: object) -> ServerSettings:
    return ServerSettings(**({"model_names": (MODEL,), "created": 1_700_000_000} | changes))  # type: ignore[arg-type]


def spec(**changes: object) -> BackendSpec:
    options: dict[str, object] = {"vocab_size": VOCAB_SIZE, "features": frozenset(Feature), "max_model_len": 1024}
    return fake_spec(**(options | changes))  # type: ignore[arg-type]


class Gate:
    """Steps wait before it while it is shut."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._has_come = threading.Event()

    def shut(self) -> None:
        self._has_come.clear()
        self._is_open.clear()

    def wait_for_a_step(self) -> None:
        """Wait until a step stands before the shut gate."""
        assert self._has_come.wait(timeout=30), "no step came"

    def open(self) -> None:
        self._is_open.set()

    def pass_through(self, _batch: Batch) -> float:
        self._has_come.set()
        assert self._is_open.wait(timeout=30), "a test left the gate shut"
        return 0.0


class Observations:
    """What the engine told, and the exposition that the app is given."""

    content_type = "text/plain; version=0.0.4"

    def __init__(self) -> None:
        self.finals: list[Final] = []
        self.num_refused = 0
        self.changed = threading.Condition()

    def render(self) -> bytes:
        return b"snapserve:observed 1\n"

    def loaded(self, spec: BackendSpec) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def read_prompt(self, add: Add) -> None: ...

    def got_tokens(self, add: Add, since_arrival: float, since_last: float | None) -> None: ...

    def generated(self, num_tokens: int) -> None: ...

    def refused(self) -> None:
        self.num_refused += 1

    def finished(self, add: Add, choice: int, final: Final) -> None:
        with self.changed:
            self.finals.append(final)
            self.changed.notify_all()

    def wait_for_finals(self, number: int) -> list[Final]:
        """Wait until so many sequences have ended in all."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.finals) >= number, timeout=30), self.finals
            return self.finals[:number]


class RunningServer:
    """What a test sees of the server it runs against."""

    def __init__(self, url: str, gate: Gate, observations: Observations) -> None:
        self.url = url
        self.gate = gate
        self.observations = observations


@contextlib.contextmanager
def serve(
    renderer: Renderer,
    server_settings: ServerSettings | None = None,
    backend_spec: BackendSpec | None = None,
    config: SchedulerConfig | None = None,
    faults: Mapping[int, BackendError] | None = None,
) -> Iterator[RunningServer]:
    """Run a server until the block ends."""
    gate, observations, listener = Gate(), Observations(), socket.create_server(("127.0.0.1", 0))
    backend = FakeBackend(backend_spec or spec(), step_time=gate.pass_through, faults=faults)
    engine = AsyncEngine(lambda: backend, config or SchedulerConfig(), observations, WallClock(), stall_limit=60)
    app = create_app(engine, renderer, server_settings or settings(), observations)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5))
    is_up = threading.Event()

    async def main() -> None:
        engine.start()
        await engine.wait_loaded()
        is_up.set()
        await server.serve(sockets=[listener])
        await engine.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server")
    thread.start()
    assert is_up.wait(timeout=30), "the server did not start"
    try:
        yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", gate, observations)
    finally:
        gate.open()
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
        assert not thread.is_alive(), "the server did not end"

"""A real server in a thread: uvicorn, the engine's thread, and the fake backend with a gate."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from backends.clock import WallClock
from backends.composite import CompositeBackend
from backends.fake import FakeBackend, fake_spec
from backends.interface import Backend, BackendError, BackendSpec, Feature
from scheduler.config import SchedulerConfig
from scheduler.messages import Add, Final
from scheduler.stats import StepRecord
from server.app import accounts, create_app, for_batches, guarded
from server.batches.dispatch import Dispatcher
from server.batches.runner import BatchRunner
from server.batches.service import Batches
from server.engine.async_engine import AsyncEngine
from server.engine.tickets import SequenceTicket
from server.grammar.compiler import Grammars
from server.http.connection import protocol_with
from server.http.observers import HttpMeter
from server.instance import open_state
from server.metrics.metrics import Metrics
from server.options.settings import ApiOptions, SchedulingOptions, ServerSettings
from server.services import Services
from server.text.draft import Draft
from server.text.renderer import Renderer
from tests.server.engines import Gate

MODEL = "demo"
VOCAB_SIZE = 2758  # of the demo model's tokenizer


def settings(**changes: Any) -> ServerSettings:
    """Return settings with these changes, of their own fields or of the options that they hold."""
    fields: dict[str, Any] = {"model_names": (MODEL,), "created": 1_700_000_000, "host": "0.0.0.0"} | changes
    for name, group in (("api", ApiOptions), ("scheduling", SchedulingOptions)):
        fields[name] = group(**{key: fields.pop(key) for key in group.model_fields if key in fields})
    return ServerSettings(**fields)


def spec(**changes: Any) -> BackendSpec:
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "features": frozenset(Feature),
        "max_model_len": 1024,
    } | changes
    return fake_spec(**options)


class Observed(Metrics):
    """The server's metrics, and a record that a test can wait on."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.adds: list[Add] = []
        self.finals: list[Final] = []
        self.statuses: list[
            int
        ] = []  # of requests that the server is done with; 499: gone before it was answered
        self.num_refused = 0
        self.num_reserved = 0
        self.last_step: StepRecord | None = None
        self._changed = threading.Condition()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, timeout=30), (self.finals, self.statuses, self.last_step)

    def wait_for_step_after(self, step: StepRecord | None) -> None:
        self.wait_until(lambda: self.last_step is not step)

    def reserved(self) -> None:
        with self._changed:
            self.num_reserved += 1
            self._changed.notify_all()

    def refused(self) -> None:
        super().refused()
        self.num_refused += 1

    def stepped(self, record: StepRecord) -> None:
        super().stepped(record)
        with self._changed:
            self.last_step = record
            self._changed.notify_all()

    def finished(self, add: Add, choice: int, final: Final) -> None:
        super().finished(add, choice, final)
        with self._changed:
            self.adds.append(add)
            self.finals.append(final)
            self._changed.notify_all()

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        super().answered(method, handler, status, seconds)
        with self._changed:
            self.statuses.append(status)
            self._changed.notify_all()


class ObservedEngine(AsyncEngine):
    """The engine's client, which says when it has issued a ticket."""

    observed: Observed

    def reserve(self, num_sequences: int, tenant: str = "", *, in_background: bool = False) -> SequenceTicket:
        ticket = super().reserve(num_sequences, tenant, in_background=in_background)
        self.observed.reserved()
        return ticket


@dataclass(frozen=True)
class RunningServer:
    """What a test sees of the server that it runs against."""

    url: str
    gate: Gate
    observed: Observed


@contextlib.asynccontextmanager
async def _running_batches(
    batches: Batches | None, routes: ASGIApp, observed: Observed, num_slots: int
) -> AsyncIterator[None]:
    if batches is None:
        yield
        return
    observed.watch_batches(batches.store)
    runner = BatchRunner(batches, Dispatcher(routes), observed)
    task = asyncio.create_task(runner.run(num_slots))
    yield
    runner.drain()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def serve(
    renderer: Renderer,
    server_settings: ServerSettings | None = None,
    backend_spec: BackendSpec | None = None,
    *,
    config: SchedulerConfig | None = None,
    faults: Mapping[int, BackendError] | None = None,
    is_open: bool = True,
    batches: Batches | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    make_backend: Callable[..., FakeBackend] = FakeBackend,
    draft: Draft | None = None,
    draft_spec: BackendSpec | None = None,
    draft_faults: Mapping[int, BackendError] | None = None,
) -> Iterator[RunningServer]:
    """Run a server until the block ends. Steps wait at its gate unless `is_open`, those of a draft too."""
    gate, observed, listener = Gate(is_open=is_open), Observed(), socket.create_server(("127.0.0.1", 0))
    backend: Backend = make_backend(backend_spec or spec(), step_time=gate.step, faults=faults)
    if draft is not None:
        scorer = make_backend(draft_spec, step_time=gate.step, faults=draft_faults)
        backend = CompositeBackend(backend, scorer)
    grammars = Grammars(renderer)
    scheduling = config or SchedulerConfig()
    engine = ObservedEngine(
        lambda: backend, scheduling, observed, WallClock(), stall_limit=60, constraints=grammars
    )
    engine.observed = observed
    server_settings = server_settings or settings()
    state = open_state(server_settings, observed)
    services = Services(engine, renderer, grammars, server_settings, observed, state, batches, draft)
    routes = create_app(services)
    limits = accounts(server_settings, state)
    metered = HttpMeter(wrap(guarded(routes, server_settings, observed, limits)), observed, WallClock().now)
    server = uvicorn.Server(
        uvicorn.Config(
            metered,
            http=protocol_with(server_settings.connections, observed),
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=5,
        )
    )
    has_loaded = threading.Event()

    async def main() -> None:
        engine.start()
        await engine.wait_loaded()
        has_loaded.set()
        async with _running_batches(
            batches,
            for_batches(routes, limits),
            observed,
            scheduling.num_background_slots(backend.spec.pools[0].num_slots),
        ):
            await server.serve(sockets=[listener])
        await engine.close()
        await state.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server")
    thread.start()
    assert has_loaded.wait(timeout=30), "the server did not start"
    try:
        yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", gate, observed)
    finally:
        gate.open()
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
        grammars.close()
        assert not thread.is_alive(), "the server did not end"

"""One server without its HTTP server: its parts, created and connected, from their start to their end.

`app` is the whole ASGI application. The runner decides about addresses, connections and signals.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp

from backends.clock import Clock
from backends.composite import CompositeBackend
from backends.conversion import with_local_model
from backends.interface import Backend, BackendSpec
from server.app import accounts, create_app, for_batches, guarded
from server.batches.dispatch import Dispatcher
from server.batches.runner import BatchRunner
from server.batches.service import Batches
from server.engine.async_engine import AsyncEngine
from server.engine.client import Health
from server.generation.turn import template_warnings
from server.grammar.compiler import Grammars
from server.http.load_report import LoadReport
from server.http.observers import HttpMeter
from server.http.simulated import SimulatedMark
from server.metrics.metrics import Metrics
from server.options.command_line import OptionError
from server.options.serve import Config
from server.options.settings import ServerSettings
from server.options.types import SQLITE
from server.services import Services
from server.state.interface import EXCHANGE_INTERVAL, Served, SharedState, StateError, StateObserver
from server.state.memory import MemoryState
from server.state.sqlite_state import SqliteState
from server.text.draft import Draft
from server.text.renderer import Renderer

logger = logging.getLogger(__name__)

STORING_TIME = 2.0  # seconds that `close` waits for background responses to be stored


class Instance:
    """The parts of one server. `start` and what follows belong to one event loop."""

    def __init__(self, config: Config, batches: Batches | None) -> None:
        """Raises `OptionError` if the file of a state cannot be used."""
        self._config = config
        self._clock: Clock = config.backend.make_clock()
        self._renderer = Renderer()
        self._draft = Draft(config.speculative_prefill) if config.draft is not None else None
        self.metrics = metrics = Metrics(config.server.model_names[0], config.process.replica)
        # The option is in seconds of real time, but the engine's clock may be a simulated one.
        stall_limit = config.process.stall_timeout * config.backend.time_scale
        self._grammars = Grammars(self._renderer)
        self._engine = AsyncEngine(
            self._load, config.scheduler, metrics, self._clock, stall_limit, self._grammars
        )
        metrics.watch(self._engine)
        self._state = open_state(config.server, metrics)
        self._services = services = Services(
            self._engine,
            self._renderer,
            self._grammars,
            config.server,
            metrics,
            self._state,
            batches,
            self._draft,
        )
        routes = create_app(services)
        limits = accounts(config.server, self._state)
        self._runner: BatchRunner | None = None
        self._running_batches: asyncio.Task[None] | None = None
        self._sharing_turns: asyncio.Task[None] | None = None
        if batches is not None:
            dispatcher = Dispatcher(for_batches(self._marked(routes), limits))
            self._runner = BatchRunner(batches, dispatcher, metrics)
            metrics.watch_batches(batches.store)
        app = self._marked(guarded(LoadReport(routes, metrics.load), config.server, metrics, limits))
        self.app: ASGIApp = HttpMeter(app, metrics, self._clock.now)
        self._shut_down_tracing: Callable[[], None] | None = None
        if config.is_traced:
            self.app = self._traced(self.app)

    def _marked(self, app: ASGIApp) -> ASGIApp:
        return app if self._config.backend.simulation is None else SimulatedMark(app)

    def _traced(self, app: ASGIApp) -> ASGIApp:
        from server.http.tracing import Tracing, provider_for

        provider = provider_for(self._config.process.otlp_endpoint)
        self._shut_down_tracing = provider.shutdown
        return Tracing(app, provider, self._clock.now)

    @property
    def spec(self) -> BackendSpec:
        return self._engine.spec

    def health(self) -> Health:
        return self._engine.health()

    def start(self) -> None:
        """Begin to load the model, and run the batches once it is loaded."""
        self._running_batches = asyncio.create_task(self._run_batches())
        if self._state.served is not None:
            self._sharing_turns = asyncio.create_task(self._share_turns(self._state.served))
        self._engine.start()

    async def wait_loaded(self) -> Health:
        """Return the engine's health once it has loaded the model or failed to."""
        health = await self._engine.wait_loaded()
        if health.is_ready:
            for warning in template_warnings(self._renderer.info.chat_template, self._config.server):
                logger.warning("%s", warning)
        return health

    async def drain(self) -> None:
        """Admit no more requests, and let the running ones finish, for at most the drain timeout."""
        # The runner first: its lines in progress may still complete while the engine drains.
        if self._runner is not None:
            self._runner.drain()
        await self._engine.drain(self._config.process.drain_timeout)

    async def close(self) -> None:
        """End everything, at once."""
        for task in (self._running_batches, self._sharing_turns):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._engine.close()  # this ends background responses, which are then stored
        if self._services.endings:
            _, unstored = await asyncio.wait(self._services.endings, timeout=STORING_TIME)
            if unstored:
                logger.warning("%d background responses could not be stored", len(unstored))
        await self._state.close()
        self._renderer.close()
        if self._draft is not None:
            self._draft.renderer.close()
        self._grammars.close()
        if self._shut_down_tracing is not None:
            await asyncio.to_thread(self._shut_down_tracing)

    def _load(self) -> Backend:
        """Load the tokenizer and the backend, after the model's conversion if it is a new GGUF file.

        Runs in the engine's thread: the imports and the load take long, and would block the event loop.
        """
        configured = with_local_model(self._config.backend)
        self._renderer.load(configured.config.model, self._config.chat_template)
        backend = configured.load(self._clock, len(self._renderer.vocabulary))
        if self._config.draft is not None and self._draft is not None:
            draft = with_local_model(self._config.draft)
            self._draft.renderer.load(draft.config.model)
            vocab_size = len(self._draft.renderer.vocabulary)
            backend = CompositeBackend(backend, draft.load(self._clock, vocab_size))
        backend.warmup()
        return backend

    async def _share_turns(self, served: Served) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_INTERVAL)
            try:
                others = await served.exchange(self._engine.take_served())
            except StateError:
                continue  # the others do not learn of these tokens
            if others:
                self._engine.charge_elsewhere(others)

    async def _run_batches(self) -> None:
        health = await self._engine.wait_loaded()
        if self._runner is None or not health.is_ready:
            return
        num_lines = sum(
            self._config.scheduler.num_background_slots(pool.num_slots) for pool in self._engine.spec.pools
        )
        try:
            await self._runner.run(num_lines)
        except Exception:
            # Requests are still served. The batches go on after a restart.
            logger.exception("running batches failed; no batch runs until the server restarts")


def open_state(settings: ServerSettings, observer: StateObserver) -> SharedState:
    """Return the state of this process, or the one that a URL names. Raises `OptionError`."""
    url = settings.api.state_url
    if url is None:
        return MemoryState(settings.storage)
    if url.startswith(SQLITE):
        try:
            return SqliteState(Path(url.removeprefix(SQLITE)), settings.storage, observer)
        except StateError as error:
            raise OptionError(f"--state-url: {error}") from error
    # Imported late: its package is an extra.
    from server.state.redis_state import RedisState

    return RedisState(url, settings.storage, observer)

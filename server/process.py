"""The serving process: creates and connects the server's parts, and runs them from start to shutdown.

The process listens before it loads the model, so that `/health` and `/ready` can report its state. It exits
if the model cannot be loaded. After the first signal it admits no more requests and lets the running ones
finish. After the second signal it exits at once.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from backends.clock import Clock, WallClock
from backends.composite import CompositeBackend
from backends.interface import Backend, BackendSpec, SlotPoolSpec
from server.app import create_app, guarded
from server.batches.dispatch import Dispatcher
from server.batches.runner import BatchRunner
from server.batches.service import Batches
from server.engine.async_engine import AsyncEngine
from server.engine.client import Health
from server.generation.turn import template_warnings
from server.grammar.compiler import Grammars
from server.http.connection import protocol_with
from server.http.observers import HttpMeter
from server.http.simulated import SimulatedMark
from server.metrics.metrics import Metrics
from server.options.serve import Config, with_flags
from server.services import Services
from server.text.draft import Draft
from server.text.renderer import Renderer

logger = logging.getLogger(__name__)

CLOSING_TIME = 5  # seconds for connections to close, after their requests have ended or were aborted


class HttpServer(uvicorn.Server):
    """uvicorn's server, except that the first signal only calls `on_signal`. The second one stops it."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._has_had_signal = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._has_had_signal:
            super().handle_exit(sig, frame)
        self._has_had_signal = True
        self._on_signal()


class Process:
    """One server. `run` runs it in the current event loop until its shutdown."""

    def __init__(self, config: Config, listener: socket.socket, batches: Batches | None) -> None:
        self._config = config
        self._listener = listener
        self._clock: Clock = config.backend.make_clock()
        self._start_time = WallClock().now()
        self._renderer = Renderer()
        self._draft = Draft(config.speculative_prefill) if config.draft is not None else None
        metrics = Metrics(config.server.model_names[0])
        # The option is in seconds of real time, but the engine's clock may be a simulated one.
        stall_limit = config.process.stall_timeout * config.backend.time_scale
        self._grammars = Grammars(self._renderer)
        self._engine = AsyncEngine(
            self._load, config.scheduler, metrics, self._clock, stall_limit, self._grammars
        )
        metrics.watch(self._engine)
        services = Services(
            self._engine, self._renderer, self._grammars, config.server, metrics, batches, self._draft
        )
        routes = create_app(services)
        self._runner: BatchRunner | None = None
        if batches is not None:
            self._runner = BatchRunner(batches, Dispatcher(self._marked(routes)), metrics)
            metrics.watch_batches(batches.store)
        app = self._marked(guarded(routes, config.server, metrics))
        metered: ASGIApp = HttpMeter(app, metrics, self._clock.now)
        self._shut_down_tracing: Callable[[], None] | None = None
        if config.is_traced:
            metered = self._traced(metered)
        self._server = HttpServer(_uvicorn_config(config, metered), self._begin_shutdown)
        self._status = 0  # the process's exit status

    def _marked(self, app: ASGIApp) -> ASGIApp:
        return app if self._config.backend.simulation is None else SimulatedMark(app)

    def _traced(self, app: ASGIApp) -> ASGIApp:
        from server.http.tracing import Tracing, provider_for

        provider = provider_for(self._config.process.otlp_endpoint)
        self._shut_down_tracing = provider.shutdown
        return Tracing(app, provider, self._clock.now)

    async def run(self) -> int:
        """Serve until a signal arrives and the running requests have ended. Returns the exit status."""
        self._loop = asyncio.get_running_loop()
        self._tasks = {asyncio.create_task(self._announce()), asyncio.create_task(self._run_batches())}
        self._engine.start()
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._engine.close()
            self._renderer.close()
            if self._draft is not None:
                self._draft.renderer.close()
            self._grammars.close()
            if self._shut_down_tracing is not None:
                await asyncio.to_thread(self._shut_down_tracing)
        return self._status

    def _load(self) -> Backend:
        """Load the tokenizer and the backend, after the model's conversion if it is a new GGUF file.

        Runs in the engine's thread: the imports and the load take long, and would block the event loop.
        """
        configured = self._config.backend.with_local_model()
        self._renderer.load(configured.config.model, self._config.chat_template)
        backend = configured.load(self._clock, len(self._renderer.vocabulary))
        if self._config.draft is not None and self._draft is not None:
            draft = self._config.draft.with_local_model()
            self._draft.renderer.load(draft.config.model)
            vocab_size = len(self._draft.renderer.vocabulary)
            backend = CompositeBackend(backend, draft.load(self._clock, vocab_size))
        backend.warmup()
        return backend

    async def _announce(self) -> None:
        health = await self._engine.wait_loaded()
        if health.is_ready:
            for warning in template_warnings(self._renderer.info.chat_template, self._config.server):
                logger.warning("%s", warning)
            print(self._ready_line(self._engine.spec), flush=True)
        else:
            self._exit_after_failed_load(health)

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

    def _ready_line(self, spec: BackendSpec) -> str:
        host, port = self._listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        seconds = WallClock().now() - self._start_time
        slots = " and ".join(_described(pool, spec.max_model_len) for pool in spec.pools)
        runs_on = f", {spec.description}" if spec.description else ""
        simulation = self._config.backend.simulation
        mark = "" if simulation is None else f", simulated: true ({simulation})"
        model = self._config.server.model_names[0]
        context = f"sequences of up to {spec.max_model_len} tokens"
        return (
            f"snapserve is ready at {url} after {seconds:.1f} s: {model}{runs_on}, {context}, {slots}{mark}"
        )

    def _exit_after_failed_load(self, health: Health) -> None:
        print(f"snapserve serve: {with_flags(health.detail)}", file=sys.stderr)
        self._status = 1
        self._server.should_exit = True

    def _begin_shutdown(self) -> None:
        """Schedule `_shut_down`. Called by a signal handler, which may interrupt any code."""
        self._loop.call_soon_threadsafe(lambda: self._tasks.add(asyncio.create_task(self._shut_down())))

    async def _shut_down(self) -> None:
        # The runner first: its lines in progress may still complete while the engine drains.
        if self._runner is not None:
            self._runner.drain()
        await self._engine.drain(self._config.process.drain_timeout)
        self._server.should_exit = True


def _described(pool: SlotPoolSpec, max_model_len: int) -> str:
    """Return a pool's part of the ready line."""
    name = "" if pool.name == pool.policy.name else f" ({pool.name})"
    kept = pool.policy.layer_kept
    by_layer = f" on average ({min(kept)} to {max(kept)} kept, by layer)" if kept else ""
    capacity = pool.policy.layout.capacity
    num_exact = pool.policy.num_exact_tokens(max_model_len)
    slots = f"{pool.num_slots} slots of {capacity} entries{by_layer}, policy {pool.policy.name}{name}"
    return f"{slots}, exact up to {num_exact} tokens"


def run_process(config: Config, listener: socket.socket, batches: Batches | None) -> int:
    """Run a server in a new event loop. Returns the exit status."""

    async def serve() -> int:
        return await Process(config, listener, batches).run()

    # uvicorn's choice: uvloop if it is installed. The config's application is not used.
    loop_factory = uvicorn.Config(serve, log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(serve())


def _uvicorn_config(config: Config, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_with(config.server.connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_TIME,
    )

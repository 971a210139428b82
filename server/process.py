"""The serving process: runs one server and its HTTP server from start to shutdown.

The process listens before it loads the model, so that `/health` and `/ready` can report its state. It exits
if the model cannot be loaded. After the first SIGINT, SIGTERM or SIGHUP it admits no more requests and lets
the running ones finish. After the second signal it exits at once.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from backends.clock import WallClock
from backends.interface import BackendSpec, SlotPoolSpec
from server.app import OPEN_PATHS
from server.batches.service import Batches
from server.engine.client import Health
from server.http.connection import protocol_with
from server.http.paths import OnlyPaths
from server.http.refusals import ConnectionObserver
from server.instance import Instance
from server.options.serve import Config, with_flags

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


class ProbeServer(uvicorn.Server):
    """uvicorn's server beside another one, which has the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Process:
    """One server. `run` runs it in the current event loop until its shutdown.

    A second listener is for probes alone.
    """

    def __init__(self, config: Config, listeners: Sequence[socket.socket], batches: Batches | None) -> None:
        self._config = config
        self._listener, *probe_listeners = listeners
        self._start_time = WallClock().now()
        self._instance = Instance(config, batches)
        app, metrics = self._instance.app, self._instance.metrics
        self._server = HttpServer(_uvicorn_config(config, app, metrics), self._begin_shutdown)
        probes = OnlyPaths(app, OPEN_PATHS | {"/metrics"})
        self._probe_servers = [
            (ProbeServer(_uvicorn_config(config, probes, metrics)), probe_listener)
            for probe_listener in probe_listeners
        ]
        self._status = 0  # the process's exit status

    async def run(self) -> int:
        """Serve until a signal arrives and the running requests have ended. Returns the exit status."""
        self._loop = asyncio.get_running_loop()
        self._tasks = {asyncio.create_task(self._announce())}
        # A terminal that closes sends SIGHUP. nohup has it ignored, and it stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._loop.add_signal_handler(signal.SIGHUP, self._server.handle_exit, signal.SIGHUP, None)
        self._instance.start()
        for server, listener in self._probe_servers:
            self._tasks.add(asyncio.create_task(server.serve(sockets=[listener])))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._instance.close()
        return self._status

    async def _announce(self) -> None:
        health = await self._instance.wait_loaded()
        # What has been loaded stays. Without it, later collections are short.
        gc.collect()
        gc.freeze()
        gc.enable()
        if health.is_ready:
            print(self._ready_line(self._instance.spec), flush=True)
        else:
            self._exit_after_failed_load(health)

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
        await self._instance.drain()
        self._server.should_exit = True


def _described(pool: SlotPoolSpec, max_model_len: int) -> str:
    """Return a pool's part of the ready line."""
    name = "" if pool.name == pool.policy.name else f" ({pool.name})"
    kept = pool.policy.layer_kept
    by_layer = f" on average ({min(kept)} to {max(kept)} kept, by layer)" if kept else ""
    capacity = pool.policy.capacity
    num_exact = pool.policy.num_exact_tokens(max_model_len)
    slots = f"{pool.num_slots} slots of {capacity} entries{by_layer}, policy {pool.policy.name}{name}"
    return f"{slots}, exact up to {num_exact} tokens"


def run_process(config: Config, listeners: Sequence[socket.socket], batches: Batches | None) -> int:
    """Run a server in a new event loop. Returns the exit status."""

    async def serve() -> int:
        return await Process(config, listeners, batches).run()

    # uvicorn's choice: uvloop if it is installed. The config's application is not used.
    loop_factory = uvicorn.Config(serve, log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(serve())


def _uvicorn_config(config: Config, app: ASGIApp, observer: ConnectionObserver) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_with(config.server.connections, observer),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_TIME,
    )

"""Replicas of one server, as processes that share a Redis and a folder of batches."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from bench.soak.ledger import Ledger
from bench.soak.target import Target
from bench.systems.servers import START_LIMIT, free_port
from bench.systems.system import ROOT, MeasurementError

DOWN_TIME = 1.0  # seconds between a kill and the next start


class Replica(Target):
    """One process of `snapserve serve` at a time, always at the same port."""

    def __init__(self, name: str, options: Sequence[str], log: Path) -> None:
        port = free_port()
        super().__init__(name, f"http://127.0.0.1:{port}")
        own = ("--port", str(port), "--replica", name)
        self._command = (sys.executable, "-m", "server", "serve", *options, *own)
        self._log = log
        self.is_up = False
        self.seconds_to_ready = 0.0
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def wait_ready(self) -> None:
        """Raises `MeasurementError`."""
        start = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while time.monotonic() - start < START_LIMIT:
                if self._process.poll() is not None:
                    output = self._log.read_text(errors="replace")[-500:]
                    raise MeasurementError(
                        f"replica {self.name} exited with {self._process.returncode}: {output}"
                    )
                try:
                    if (await client.get(f"{self.base_url}/ready")).status_code == 200:
                        self.is_up = True
                        self.seconds_to_ready = time.monotonic() - start
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        raise MeasurementError(f"replica {self.name} was not ready after {START_LIMIT:.0f} s")

    async def kill_and_restart(self) -> None:
        """Kill the process with SIGKILL, and return when the next one is ready. Raises `MeasurementError`."""
        # No client runs until the process has died: it has all requests until now, and none from now on.
        self.earlier.append(self.ledger)
        self.ledger = Ledger()
        self.is_up = False
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        await asyncio.sleep(DOWN_TIME)
        self._start()
        await self.wait_ready()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def replicas(count: int, options: Sequence[str], folder: Path) -> Iterator[list[Replica]]:
    """Start a Redis and `count` replicas, and stop them. Raises `MeasurementError`."""
    with ExitStack() as stack:
        url = stack.enter_context(_redis(folder))
        shared = ("--state-url", url, "--batch-dir", str(folder / "batches"))
        started = []
        for number in range(count):
            name = f"replica-{number}"
            started.append(Replica(name, (*options, *shared), folder / f"{name}.log"))
            stack.callback(started[-1].stop)

        async def wait_ready() -> None:
            await asyncio.gather(*(replica.wait_ready() for replica in started))

        asyncio.run(wait_ready())
        yield started


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        raise MeasurementError(
            "replicas need the program redis-server (Debian: apt-get install redis-server)"
        )
    socket = folder / "redis.sock"
    options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([program, *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_LIMIT
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise MeasurementError(f"Redis did not start: {(folder / 'redis.log').read_text()[-500:]}")
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()

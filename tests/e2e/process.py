"""A real `snapserve serve` process on a free loopback port, of the demo model unless a test names another.

A server imports for 4 s, so the servers of a test process are forks of one that has imported everything.
Tests of commands and scripts start processes of their own.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT = 120.0  # seconds, for a machine that is busy with other things

# Some tests start servers in threads. The lock guards this process's variables and the state of its children.
_LOCK = threading.Lock()
_is_forking = False
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["commands.cli", "server.serve", "server.process", "backends.torch_backend.backend"]
)


class Process:
    """A fork that runs `python -m server serve`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.touch()
        with _LOCK:
            _start_forking(environment)
            self._process = _FORKS.Process(target=_serve, args=([*arguments], dict(environment), log))
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("snapserve serve", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _spawned(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "server", "serve", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def _start_forking(environment: Mapping[str, str]) -> None:
    """Start the process that forks, once. OpenMP reads its variables there, when torch is imported."""
    global _is_forking
    if _is_forking:
        return
    before = dict(os.environ)
    try:
        _set_environment(environment)
        forkserver.ensure_running()
    finally:
        _set_environment(before)
    _is_forking = True


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _serve(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Be the process of a server."""
    with log.open("wb") as output:
        for number in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(output.fileno(), number)
    _set_environment(environment)
    sys.argv[1:] = ["serve", *arguments]
    runpy.run_module("server", run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Server:
    """A server that is ready, and the seconds from its start to `/ready`."""

    url: str
    seconds_to_ready: float
    process: "Process | subprocess.Popen[bytes]"

    def metrics(self) -> dict[str, float]:
        """Return each sample of `/metrics`, summed over its labels, under its name.

        A sample is also there under `name{values}`, with the values of its own labels.
        """
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                own_labels = [
                    value
                    for label, value in sample.labels.items()
                    if label not in ("model_name", "engine", "le")
                ]
                for key in (sample.name, f"{sample.name}{{{','.join(own_labels)}}}"):
                    totals[key] = totals.get(key, 0.0) + sample.value
        return totals


@contextmanager
def serve(*arguments: str, log: Path, is_forked: bool = True) -> Iterator[Server]:
    """Start a server, yield it once it is ready, and stop it.

    One that is not forked reads variables at its imports, such as XDG_CACHE_HOME.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _LOCK:
        variables = dict(os.environ)
    # All threads, as a user has. `scripts/test` sets OMP_WAIT_POLICY, so that threads that wait sleep.
    environment = {
        name: value for name, value in variables.items() if not name.startswith(("SNAPSERVE_", "OMP_NUM_"))
    }
    # Every server would compile, beside all other tests.
    environment["SNAPSERVE_COMPILE"] = "no"
    start = time.monotonic()
    options = ["--model", "demo", "--port", str(port), *arguments]
    process = (Process if is_forked else _spawned)(options, environment, log)
    try:
        _wait_until_ready(url, process, start, log)
        yield Server(url, time.monotonic() - start, process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


def free_port() -> int:
    """Return a loopback port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(url: str, process: Process | subprocess.Popen[bytes], start: float, log: Path) -> None:
    while time.monotonic() - start < START_LIMIT:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the server was not ready within {START_LIMIT:.0f} s:\n{log.read_text()}")

"""A real `snapserve serve` process on a free loopback port, of the demo model unless a test names another."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT = 120.0  # seconds, for a machine that is busy with other things


@dataclass(frozen=True)
class Server:
    """A server that is ready, and the seconds from its start to `/ready`."""

    url: str
    seconds_to_ready: float
    process: subprocess.Popen[bytes]

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
def serve(*arguments: str, log: Path) -> Iterator[Server]:
    """Start a server, yield it once it is ready, and stop it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # All threads, as a user has. `scripts/test` sets OMP_WAIT_POLICY, so that threads that wait sleep.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SNAPSERVE_", "OMP_NUM_"))
    }
    # Every server would compile, beside all other tests.
    environment["SNAPSERVE_COMPILE"] = "no"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", "--model", "demo", "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _wait_until_ready(url, process, start, log)
            yield Server(url, time.monotonic() - start, process)
        finally:
            process.terminate()
            process.wait(timeout=60)


def free_port() -> int:
    """Return a loopback port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], start: float, log: Path) -> None:
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

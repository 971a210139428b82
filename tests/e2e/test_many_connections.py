"""Ten thousand idle connections: probes and metrics answer, refusals are counted, later clients served."""

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import Server, free_port, serve

NUM_IDLE = 10_000
NUM_REFUSED = 200  # beyond the limit
_OTHER_FILES = 300  # of this process and of the server, beside the connections


@pytest.fixture
def num_idle() -> Iterator[int]:
    """How many connections this process and the server may hold, which have the same limit of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = NUM_IDLE if hard == resource.RLIM_INFINITY else min(NUM_IDLE, hard - NUM_REFUSED - _OTHER_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number + NUM_REFUSED + _OTHER_FILES, hard))
    yield number
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
def test_probes_and_metrics_answer_beside_idle_connections(tmp_path: Path, num_idle: int) -> None:
    admin_port = free_port()
    limits = ("--max-connections", str(num_idle), "--idle-timeout", "600", "--admin-port", str(admin_port))
    log = tmp_path / "log"
    with serve("--backend", "fake", *limits, log=log) as server:
        address = httpx.URL(server.url)
        with ExitStack() as stack:
            for _ in range(num_idle + NUM_REFUSED):
                stack.enter_context(socket.create_connection((address.host, address.port or 80), timeout=60))
            admin = Server(f"http://127.0.0.1:{admin_port}", 0.0, server.process)
            for path in ("/health", "/ready", "/metrics"):
                start = time.monotonic()
                assert httpx.get(admin.url + path, timeout=60).status_code == 200
                assert time.monotonic() - start < 5
            # The last connections may not have been accepted when the first metrics were read.
            end = time.monotonic() + 60
            while (metrics := admin.metrics())["snapserve:refused_connections_total"] < NUM_REFUSED:
                assert time.monotonic() < end, metrics["snapserve:refused_connections_total"]
                time.sleep(0.2)
            assert metrics["process_open_fds"] >= num_idle
            assert is_refused(server.url)
        assert "connections beyond --max-connections" in log.read_text()
        end = time.monotonic() + 60
        while is_refused(server.url):
            assert time.monotonic() < end, "connections that were closed still count"
            time.sleep(0.2)


def is_refused(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=60).status_code == 503
    return True

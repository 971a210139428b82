"""Servers with several faults, kept busy by clients, under one Prometheus. They start once a module."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.load import clients, eager, mixed
from tests.deploy.prometheus import Prometheus, scraping
from tests.e2e.process import Server, free_port, serve

PROGRAMS = ("prometheus", "promtool")
SIMULATED = ("--backend", "sn40l", "--inner", "fake")  # real processes, real seconds, no model to compute

# Each server's options, the number of its clients, and their requests.
HEALTHY = ("--slot-capacity", "256", "--num-slots", "4", "--served-model-name", "healthy", "*")
OVERLOADED = (
    "--fault",
    "slow-socket=250",
    "--num-slots",
    "16",
    "--max-num-waiting",
    "32",
    "--served-model-name",
    "overloaded",
    "*",
)
FAILING = ("--fault", "failed-step=10:3", "--served-model-name", "failing", "*")
# SnapserveStuck fires about 5 s after the link stalls, if every scrape succeeds. The stall timeout leaves
# time for scrapes that a busy machine misses.
HANGING = ("--fault", "stalled-link=20:3600", "--stall-timeout", "30", "--served-model-name", "hanging", "*")
FAULTS = {
    "healthy": (HEALTHY, 8, mixed),
    "overloaded": (OVERLOADED, 60, eager),
    "failing": (FAILING, 2, eager),
    "hanging": (HANGING, 2, eager),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if item.get_closest_marker("prometheus") is not None and missing:
        pytest.skip(f"needs {' and '.join(missing)} (Debian: apt-get install prometheus)")


@dataclass(frozen=True)
class Scene:
    """The servers by namespace, and their Prometheus. In the namespace `gone` nothing listens."""

    servers: dict[str, Server]
    prometheus: Prometheus


@contextmanager
def killed_at_the_end(fault: str, folder: Path) -> Iterator[Server]:
    with serve(*SIMULATED, *FAULTS[fault][0], log=folder / f"{fault}.log") as server:
        try:
            yield server
        finally:
            server.process.kill()  # one that hangs would take its drain timeout


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(FAULTS)) as executor:
            started = list(
                executor.map(lambda fault: stack.enter_context(killed_at_the_end(fault, folder)), FAULTS)
            )
        servers = dict(zip(FAULTS, started, strict=True))
        addresses = {fault: server.url.removeprefix("http://") for fault, server in servers.items()}
        prometheus = stack.enter_context(scraping(addresses | {"gone": f"127.0.0.1:{free_port()}"}, folder))
        for fault, (_, num_clients, send) in FAULTS.items():
            stack.enter_context(clients(servers[fault].url, num_clients, send))
        yield Scene(servers, prometheus)

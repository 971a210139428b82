"""A server of the embedded demo model, and the clients' own environment from `scripts/setup-clients`."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.process import Server, serve
from tests.paths import ROOT

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE_MODULES = ROOT / ".venv-clients" / "node_modules"
TIME_LIMIT = 300.0  # seconds, for a machine that is busy with other things


def pytest_runtest_setup(item: pytest.Item) -> None:
    is_installed = PYTHON.exists() and NODE_MODULES.exists() and shutil.which("node") is not None
    if item.get_closest_marker("clients") is not None and not is_installed:
        pytest.skip("needs the clients' environment (Node and npm installed, then `scripts/setup-clients`)")


@pytest.fixture(scope="session")
def client_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    with serve("--dtype", "float32", "--batch-dir", str(folder / "batches"), log=folder / "log") as server:
        yield server


def run(*command: str | Path, last: str = "ok", environment: Mapping[str, str] | None = None) -> None:
    """Run a client to its end. Fails, with its output, unless it succeeds and its output ends with `last`."""
    variables = os.environ | (environment or {})
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=TIME_LIMIT, env=variables, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.rstrip().endswith(last), done.stdout[-4000:]

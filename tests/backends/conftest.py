"""Fixtures of all backends: a folder for compiled code, so that each graph is compiled once for all tests."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="session")
def warm_builder() -> Iterator[None]:
    """Let backends of this process build in processes that have imported torch's compiler."""
    from backends.torch_backend.compiled import code  # tests of other backends need no torch
    from tests.backends import builder

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        address = f"{folder}/socket"
        patch.setattr(code, "_BUILD", (*builder.CLIENT, address))
        command = [sys.executable, "-m", builder.__name__, address]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=ROOT) as process:
            while not os.path.exists(address):
                assert process.poll() is None, "the process that compiles for tests has ended"
                time.sleep(0.05)
            yield  # the pipe is closed behind this, which ends the process


@pytest.fixture
def cold_builder(monkeypatch: pytest.MonkeyPatch, warm_builder: None) -> None:  # noqa: ARG001 — it comes first
    """Let backends of this test build as they do for users."""
    command = (sys.executable, "-m", "backends.torch_backend.compiled.build")
    monkeypatch.setattr("backends.torch_backend.compiled.code._BUILD", command)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory, warm_builder: None) -> Path:  # noqa: ARG001
    """One folder for all of pytest's processes. The process that compiles locks it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def built_kernels(compile_cache: Path) -> Path:
    """The kernels, where a backend will look for them."""
    from tests.backends.kernels import kernels_in  # tests of other backends need no torch

    if "TESTED_KERNELS" in os.environ:  # of another instruction set
        return Path(os.environ["TESTED_KERNELS"])
    return kernels_in(compile_cache)

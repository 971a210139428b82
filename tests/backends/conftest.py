"""Fixtures of all backends: a folder for compiled code, so that each graph is compiled once for all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
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

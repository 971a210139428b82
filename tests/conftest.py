"""Options and limits of every test."""

import functools
import gc
import os
import shutil
import ssl
import tempfile
from collections.abc import Generator, Iterator

# Set before torch is imported: tiny models are fastest on one thread, and servers need the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without their bytecode, each of the many processes that tests start would compile all of its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

from tests.paths import ROOT

MAY_BE_SKIPPED = ("gpu", "openai_schema")
HEADERS = "SNAPSERVE_TEST_HEADERS"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `long` too")
    parser.addoption(
        "--forbid-skips",
        action="store_true",
        help=f"fail each test that is skipped, unless it is marked {' or '.join(MAY_BE_SKIPPED)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes of this run compile with one precompiled header."""
    if "CXX" not in os.environ and shutil.which("g++"):
        folder = tempfile.mkdtemp(prefix="snapserve-headers-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ |= {HEADERS: folder, "CXX": str(ROOT / "tests" / "g++")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, unless all are requested."""
    if config.getoption("--all"):
        return
    long = [item for item in items if item.get_closest_marker("long") is not None]
    if long:
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
        config.hook.pytest_deselected(items=long)


def pytest_collection_finish() -> None:
    """Leave what was imported so far out of garbage collections: each backend that is opened runs one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_allowed = any(item.get_closest_marker(name) for name in MAY_BE_SKIPPED) or hasattr(report, "wasxfail")
    if report.skipped and item.config.getoption("--forbid-skips") and not is_allowed:
        report.outcome = "failed"
        report.longrepr = f"--forbid-skips does not allow this skip: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Share one TLS context: each HTTP client takes 30 ms to read the certificates that no test needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield

"""What holds for every test."""

import os
from collections.abc import Generator

# Before torch is imported: tiny models are fastest on one thread, and servers under test want the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

MAY_BE_SKIPPED = ("gpu", "openai_schema")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"a skipped test fails, unless it is marked {' or '.join(MAY_BE_SKIPPED)}: where every program is installed, nothing is left out"
    parser.addoption("--forbid-skips", action="store_true", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_allowed = any(item.get_closest_marker(name) for name in MAY_BE_SKIPPED) or hasattr(report, "wasxfail")
    if report.skipped and item.config.getoption("--forbid-skips") and not is_allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped, which --forbid-skips does not allow: {report.longrepr}"
    return report

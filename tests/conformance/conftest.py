"""Conformance of any OpenAI-compatible server.

Usage: `pytest tests/conformance --base-url URL [--api-key KEY] [--model NAME]`.

Each test checks a feature and passes, fails, or finds it unsupported: refused openly, by a missing route
or an error that says so. No test expects anything of a text's content, so that any model will do. At the end
a table lists all features; `--conformance-json` writes it. Without a base URL the suite runs against this
project's own server, where nothing may be unsupported.
"""

import json
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.api import Api
from tests.e2e.process import serve

OWN_KEY = "conformance"
PASS, FAIL, UNSUPPORTED = "pass", "FAIL", "unsupported"
_results = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--base-url", help="the server to test, without /v1; default: one of this project's own")
    group.addoption("--api-key", default=OWN_KEY, help="a key that the server takes")
    group.addoption("--model", help="the model's name; default: the first that the server lists")
    group.addoption("--conformance-json", type=Path, help="file for the table of features")


@pytest.fixture(scope="session")
def base_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = request.config.getoption("--base-url", default=None)
    if given is not None:
        yield given.rstrip("/").removesuffix("/v1")
        return
    folder = tmp_path_factory.mktemp("conformance")
    with serve(
        "--dtype", "float32", "--api-key", OWN_KEY, "--batch-dir", str(folder / "batches"), log=folder / "log"
    ) as server:
        yield server.url


@pytest.fixture(scope="session")
def api(request: pytest.FixtureRequest, base_url: str) -> Iterator[Api]:
    headers = {"authorization": f"Bearer {request.config.getoption('--api-key', default=OWN_KEY)}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=300) as http:
        name = request.config.getoption("--model", default=None)
        yield Api(http, name or http.get("/v1/models").raise_for_status().json()["data"][0]["id"])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_results] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what became of the feature that a test's docstring names."""
    report = yield
    if report.when == "call" or not report.passed:
        outcome = UNSUPPORTED if report.skipped else PASS if report.passed else FAIL
        assert isinstance(item, pytest.Function)
        results, feature = item.config.stash[_results], str(item.function.__doc__)
        results[feature] = max(
            outcome, results.get(feature, PASS), key=(PASS, UNSUPPORTED, FAIL).index
        )  # of several cases the worst
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print a table of all features."""
    results = config.stash[_results]
    width = max(map(len, results), default=0)
    terminalreporter.section("conformance")
    for feature, outcome in results.items():
        terminalreporter.line(f"{feature:{width}}  {outcome}")
    counts = Counter(results.values())
    terminalreporter.line(", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASS, FAIL, UNSUPPORTED)))
    path = config.getoption("--conformance-json", default=None)
    if path is not None:
        path.write_text(json.dumps({"features": results, "counts": counts}, indent=1) + "\n")

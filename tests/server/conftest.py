"""One server for the tests that do not change it, and clients of it."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    renderer.load(str(DEMO_MODEL))
    yield renderer
    renderer.close()


@pytest.fixture(scope="session")
def running(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer) as server:
        yield server


@pytest.fixture
def http(running: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


@pytest.fixture
def sdk(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client

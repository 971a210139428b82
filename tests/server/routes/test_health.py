"""`/health`, `/ready`, `/version` and `/metrics`, from before the model is loaded to the last request."""

import asyncio
import threading
from collections.abc import AsyncIterator

import httpx
import pytest

from backends.clock import WallClock
from backends.fake import FakeBackend
from backends.interface import Backend
from scheduler.config import SchedulerConfig
from server.app import create_app
from server.engine.async_engine import AsyncEngine
from server.grammar.compiler import Grammars
from server.services import Services
from server.state.memory import MemoryState
from server.text.renderer import Renderer
from tests.server.engines import Gate
from tests.server.serving import MODEL, Observed, settings, spec

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


class Loading:
    """A model that is loaded on request of the test."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.may_end = threading.Event()
        self.fails = False

    def __call__(self) -> Backend:
        assert self.may_end.wait(timeout=30), "a test left a model loading"
        if self.fails:
            raise OSError("secret/path is not there")
        return FakeBackend(spec(max_decode_steps=1), step_time=self.gate.step)


def services_of(engine: AsyncEngine, renderer: Renderer) -> Services:
    made = settings()
    return Services(engine, renderer, Grammars(renderer), made, Observed(), MemoryState(made.storage))


@pytest.fixture
def loading() -> Loading:
    return Loading()


@pytest.fixture
async def engine(loading: Loading) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(loading, SchedulerConfig(), Observed(), WallClock(), stall_limit=60)
    engine.start()
    yield engine
    loading.may_end.set()
    loading.gate.open()
    await engine.wait_loaded()
    await engine.close()


@pytest.fixture
async def http(engine: AsyncEngine, renderer: Renderer) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(services_of(engine, renderer)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def states(http: httpx.AsyncClient) -> tuple[int, int, str]:
    health, ready = await http.get("/health"), await http.get("/ready")
    assert health.json() == ready.json()
    return health.status_code, ready.status_code, health.json()["status"]


async def test_while_the_model_is_loaded_and_after(
    http: httpx.AsyncClient, loading: Loading, engine: AsyncEngine
) -> None:
    assert await states(http) == (200, 503, "loading")
    for method, path, body in (
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
    ):
        response = await http.request(method, path, json=body, headers={"Content-Type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading"), path
        assert response.headers["retry-after"]
    assert (await http.get("/ready")).headers["retry-after"]
    loading.may_end.set()
    await engine.wait_loaded()
    assert await states(http) == (200, 200, "ready")
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_model_that_cannot_be_loaded_is_reported(
    http: httpx.AsyncClient, loading: Loading, engine: AsyncEngine
) -> None:
    loading.fails = True
    loading.may_end.set()
    await engine.wait_loaded()
    assert await states(http) == (503, 503, "dead")
    assert "secret" not in (await http.get("/health")).text


async def test_a_draining_server_finishes_requests_and_refuses_new_ones(
    http: httpx.AsyncClient, loading: Loading, engine: AsyncEngine
) -> None:
    loading.gate = Gate(is_open=False)
    loading.may_end.set()
    await engine.wait_loaded()
    running = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
    await loading.gate.wait_for_step()
    draining = asyncio.create_task(engine.drain(limit=30))
    await asyncio.sleep(0)
    assert await states(http) == (200, 503, "draining")
    refused = await http.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
    loading.gate.open()
    loading.gate.let(100)
    assert (await running).status_code == 200
    await draining


async def test_an_engine_that_makes_no_progress_is_not_well(renderer: Renderer, loading: Loading) -> None:
    loading.gate = Gate(is_open=False)
    loading.may_end.set()
    engine = AsyncEngine(loading, SchedulerConfig(), Observed(), WallClock(), stall_limit=0)
    engine.start()
    await engine.wait_loaded()
    transport = httpx.ASGITransport(create_app(services_of(engine, renderer)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        assert await states(http) == (200, 200, "ready")
        running = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await loading.gate.wait_for_step()
        assert await states(http) == (503, 503, "stalled")
        loading.gate.open()
        loading.gate.let(100)
        assert (await running).status_code == 200
        # The engine's thread may still be ending the step when its answer is here.
        async with asyncio.timeout(10):
            while (await http.get("/ready")).status_code != 200:
                pass
        assert await states(http) == (200, 200, "ready")
    await engine.close()


async def test_version_and_metrics(http: httpx.AsyncClient, loading: Loading, engine: AsyncEngine) -> None:
    loading.may_end.set()
    await engine.wait_loaded()
    assert (await http.get("/version")).json()["version"]
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert f'model_name="{MODEL}"' in metrics.text

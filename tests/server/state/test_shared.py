"""Two servers with one real Redis: what one of them stores, limits or makes, the other one knows."""

import asyncio
import time
from collections.abc import Callable, Iterator

import openai
import pytest

from server.metrics.metrics import Metrics
from server.options.settings import RateLimit, StorageLimits
from server.state import redis_state
from server.state.interface import StoredResponse
from server.state.redis_state import RedisState
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings
from tests.server.state.conftest import RedisServer

pytestmark = pytest.mark.redis

NewClient = Callable[[RunningServer], openai.OpenAI]


@pytest.fixture
def client() -> Iterator[NewClient]:
    clients = []

    def new(server: RunningServer) -> openai.OpenAI:
        url = f"{server.url}/v1"
        clients.append(openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=30))
        return clients[-1]

    yield new
    for each in clients:
        each.close()


@pytest.fixture
def servers(renderer: Renderer, redis_server: RedisServer) -> Iterator[tuple[RunningServer, RunningServer]]:
    shared = settings(state_url=redis_server.url)
    with (
        serve(renderer, shared, is_open=False) as here,
        serve(renderer, shared, is_open=False) as there,
    ):
        yield here, there


async def test_a_bucket_gives_all_replicas_together_its_limit(redis_server: RedisServer) -> None:
    states = [RedisState(redis_server.url, StorageLimits(), Metrics("demo")) for _ in range(3)]
    start = time.monotonic()
    taken = await asyncio.gather(
        *(states[number % 3].buckets.take("me:tokens", 600, 10) for number in range(100))
    )
    num_taken = 10 * sum(is_taken for _, is_taken in taken)
    assert 600 <= num_taken <= 600 + 10 * (time.monotonic() - start) + 10
    states[0].buckets.settle("me:tokens", 600, -300)
    await states[0].buckets.close()
    level, is_taken = await states[1].buckets.take("me:tokens", 600, 299)
    assert is_taken
    assert level < 20
    # No one is limited by another's use, and a refund fills no bucket beyond its limit.
    states[0].buckets.settle("you:tokens", 600, -300)
    await states[0].buckets.close()
    assert await states[1].buckets.take("you:tokens", 600, 601) == (600, False)
    for state in states:
        await state.close()


async def test_replicas_learn_what_the_others_served(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_state, "WINDOW", window := 2)
    await asyncio.sleep(window - time.time() % window)
    states = [RedisState(redis_server.url, StorageLimits(), Metrics("demo")) for _ in range(3)]
    first, second, third = (state.served for state in states)
    assert await first.exchange({"a": 5}) == await second.exchange({}) == {}
    assert await first.exchange({"a": 10, "\ud800": 1}) == {}
    assert await second.exchange({"a": 7}) == {"a": 10, "\ud800": 1}
    assert await third.exchange({}) == {}  # it has just begun
    await asyncio.sleep(window)
    assert await second.exchange({"b": 3}) == {}
    assert await first.exchange({"a": 2}) == {"a": 7, "b": 3}
    assert await third.exchange({}) == {"a": 2, "b": 3}
    assert await second.exchange({}) == {"a": 2}
    for state in states:
        await state.close()


def test_rate_limits_count_at_all_replicas(
    renderer: Renderer, redis_server: RedisServer, client: NewClient
) -> None:
    shared = settings(state_url=redis_server.url, rate_limit=RateLimit(requests=3, tokens=1000))
    with serve(renderer, shared) as here, serve(renderer, shared) as there:
        for server in (here, there, here):
            client(server).completions.create(model="demo", prompt="Anna keeps", max_tokens=2)
        with pytest.raises(openai.RateLimitError) as refused:
            client(there).completions.create(model="demo", prompt="Anna keeps", max_tokens=2)
    assert int(refused.value.response.headers["x-ratelimit-remaining-tokens"]) < 1000


def test_a_conversation_goes_on_at_another_replica(
    servers: tuple[RunningServer, RunningServer], client: NewClient
) -> None:
    for server in servers:
        server.gate.open()
    here, there = map(client, servers)
    first = here.responses.create(model="demo", input="Who keeps the lamp?", max_output_tokens=4)
    assert there.responses.retrieve(first.id) == here.responses.retrieve(first.id)
    second = there.responses.create(
        model="demo", input="And now?", previous_response_id=first.id, max_output_tokens=4
    )
    assert [item.id for item in here.responses.input_items.list(second.id)][-1] == [
        item.id for item in there.responses.input_items.list(first.id)
    ][-1]
    there.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        here.responses.retrieve(first.id)


def test_a_background_response_is_seen_and_cancelled_at_another_replica(
    servers: tuple[RunningServer, RunningServer], client: NewClient
) -> None:
    here, there = map(client, servers)
    made = here.responses.create(model="demo", input="Hello", background=True, max_output_tokens=8)
    assert there.responses.retrieve(made.id).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        there.responses.create(model="demo", input="And?", previous_response_id=made.id)
    cancelled = there.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert here.responses.retrieve(made.id).status == "cancelled"
    other = here.responses.create(model="demo", input="Hello", background=True, max_output_tokens=8)
    servers[0].gate.open()
    deadline = time.monotonic() + 60
    while (status := there.responses.retrieve(other.id).status) != "incomplete":  # at its limit
        assert status in ("queued", "in_progress")
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_background_response_of_a_dead_replica_has_failed(
    servers: tuple[RunningServer, RunningServer],
    client: NewClient,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_state, "LEASE", 2.0)
    dead = RedisState(redis_server.url, StorageLimits(), Metrics("demo"))
    assert await dead.responses.announce("", "resp_1", b'{"status": "in_progress", "background": true}')
    there = client(servers[1])
    assert (await asyncio.to_thread(there.responses.retrieve, "resp_1")).status == "in_progress"
    await asyncio.sleep(2.1)
    failed = await asyncio.to_thread(there.responses.retrieve, "resp_1")
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"
    await dead.close()


async def test_a_command_that_times_out_is_not_sent_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_state, "PAUSE", 0.0)
    state = RedisState(redis_server.url, StorageLimits(), Metrics("demo"))
    await state.buckets.take("me:tokens", 60_000, 0)
    redis_server.pause(1.5)
    await state.buckets.take("me:tokens", 60_000, 20_000)  # taken by this replica alone, and there too
    await asyncio.sleep(1.0)
    level, _ = await state.buckets.take("me:tokens", 60_000, 0)
    assert 40_000 <= level < 45_000
    await state.close()


async def test_many_requests_share_few_connections(redis_server: RedisServer) -> None:
    state = RedisState(redis_server.url, StorageLimits(), Metrics("demo"))
    await asyncio.gather(*(state.buckets.take("me:tokens", 60_000, 1) for _ in range(300)))
    info = await state.client.info("clients")
    assert info["connected_clients"] <= redis_state.MAX_CONNECTIONS
    await state.close()


async def test_without_memory_nothing_else_is_given_up(redis_server: RedisServer) -> None:
    state = RedisState(redis_server.url, StorageLimits(), Metrics("demo"))
    await state.client.config_set("maxmemory", 1)
    try:
        assert not await state.responses.put("me", StoredResponse("resp_1", b"{}", b"[]"))
    finally:
        await state.client.config_set("maxmemory", 0)
    assert await state.responses.put("me", StoredResponse("resp_1", b"{}", b"[]"))
    await state.close()


def test_without_redis_replicas_answer_and_limit_alone(
    renderer: Renderer, redis_server: RedisServer, client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_state, "PAUSE", 0.0)
    shared = settings(state_url=redis_server.url, rate_limit=RateLimit(requests=3))
    with serve(renderer, shared) as server:
        sdk = client(server)
        stored = sdk.responses.create(model="demo", input="Hello", max_output_tokens=4)
        redis_server.kill()
        try:
            with pytest.raises(openai.InternalServerError) as unavailable:
                sdk.responses.retrieve(stored.id)
            assert (unavailable.value.status_code, unavailable.value.code) == (503, "state_unavailable")
            lost = sdk.responses.create(model="demo", input="Hello", max_output_tokens=4)
            assert lost.output_text
            assert lost.model_extra is not None
            assert lost.model_extra["store"] is False
            for _ in range(2):
                sdk.completions.create(model="demo", prompt="Anna keeps", max_tokens=2)
            with pytest.raises(openai.RateLimitError):
                sdk.completions.create(model="demo", prompt="Anna keeps", max_tokens=2)
            (errors,) = (
                line
                for line in server.observed.render().decode().splitlines()
                if line.startswith("snapserve:shared_state_errors_total")
            )
            assert float(errors.split()[-1]) > 0
        finally:
            redis_server.start()
        with pytest.raises(openai.NotFoundError):  # this Redis keeps nothing on the disk
            sdk.responses.retrieve(stored.id)

"""Requests and tokens a minute: the buckets on a virtual clock, and the headers of answers, over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from backends.clock import VirtualClock
from server.http.errors import ApiError
from server.http.rate_limits import DEFAULT_MAX_TOKENS, Accounts, Bucket, duration
from server.http.record import RequestRecord
from server.options.command_line import OptionError
from server.options.keys import read_key_file
from server.options.settings import RateLimit
from server.state.memory import MemoryBuckets
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings

PROMPT = {"prompt": "Anna keeps", "ignore_eos": True, "temperature": 0}


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), max_size=60))
def test_no_minute_exceeds_twice_the_limit_and_retry_after_suffices(
    limit: int, asks: list[tuple[float, int]]
) -> None:
    """A full bucket, and what flows in meanwhile."""
    clock, taken = VirtualClock(), list[tuple[float, int]]()
    bucket = Bucket("tokens", limit, "me", MemoryBuckets(clock.now))

    async def ask() -> None:
        for seconds, amount in asks:
            clock.elapse(seconds)
            await bucket.look()
            if amount > bucket.level:
                with pytest.raises(ApiError) as refused:
                    await bucket.take(amount)
                assert (refused.value.status, refused.value.code, refused.value.kind) == (
                    429,
                    "rate_limit_exceeded",
                    "tokens",
                )
                assert ("Retry-After" in refused.value.headers) == (amount <= limit)
                if amount > limit:
                    continue
                clock.elapse(int(refused.value.headers["retry-after-ms"]) / 1000)
            await bucket.take(amount)
            taken.append((clock.now(), amount))

    asyncio.run(ask())
    for start, _ in taken:
        assert sum(amount for time, amount in taken if start <= time < start + 60) <= 2 * limit + 1


async def test_tokens_are_reserved_and_settled_by_what_was_used() -> None:
    record, late = RequestRecord("x"), RequestRecord("y")
    accounts = Accounts(RateLimit(tokens=600), {}, MemoryBuckets(VirtualClock().now))
    quota = accounts.quota(record)
    await quota.look()
    await quota.admit()
    await quota.reserve(500)
    assert record.headers["x-ratelimit-remaining-tokens"] == "100"
    with pytest.raises(ApiError, match="Used 500"):
        await accounts.quota(late).reserve(101)
    record.num_prompt_tokens, record.num_output_tokens = 20, 30
    quota.settle()
    await accounts.quota(late).look()
    assert late.headers["x-ratelimit-remaining-tokens"] == "550"


async def test_usage_above_the_reservation_delays_the_next_request() -> None:
    clock, record, later = VirtualClock(), RequestRecord("x"), RequestRecord("y")
    accounts = Accounts(RateLimit(requests=10, tokens=60), {}, MemoryBuckets(clock.now))
    quota = accounts.quota(record)
    await quota.reserve(50)
    record.num_output_tokens = 90
    quota.settle()
    late = accounts.quota(later)
    await late.look()
    with pytest.raises(ApiError) as refused:
        await late.admit()
    assert (refused.value.kind, refused.value.headers["Retry-After"]) == ("tokens", "31")
    assert late.refused_by == "tokens"
    assert later.headers["x-ratelimit-remaining-tokens"] == "0"
    assert later.headers["x-ratelimit-remaining-requests"] == "10"
    clock.elapse(31)
    await late.look()
    await late.admit()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0171, "18ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (90.951, "1m30.951s"),
        (3600, "60m0s"),
    ],
)
def test_times_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_answer_has_rate_limit_headers(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(rate_limit=RateLimit(requests=3, tokens=10_000))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        first = http.post("/v1/completions", json=PROMPT | {"max_tokens": 5})
        used = first.json()["usage"]["total_tokens"]
        server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "10000"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(10_000 - used)
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        refused = http.post("/v1/completions", json=PROMPT | {"max_tokens": -1})
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (400, "2")
        with http.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "1"
            stream.read()
        assert (
            http.post("/v1/embeddings", json={"input": "Anna"}).headers["x-ratelimit-remaining-requests"]
            == "0"
        )
        last = http.post("/v1/completions", json=PROMPT)
    assert last.status_code == 429
    assert last.json()["error"]["type"] == "requests"
    assert last.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(last.headers["retry-after"]) <= 20
    assert "x-request-id" in last.headers


@pytest.mark.parametrize(
    "body", [{"prompt": [5] * 800, "max_tokens": 1}, {"prompt": "Anna", "max_tokens": 800}]
)
def test_read_and_generated_tokens_are_charged(renderer: Renderer, body: dict[str, Any]) -> None:
    with (
        serve(renderer, settings(rate_limit=RateLimit(tokens=1000))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert http.post("/v1/completions", json=PROMPT | body).status_code == 200
        server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
        left = http.post("/tokenize", json={"prompt": "x"}).headers["x-ratelimit-remaining-tokens"]
        assert int(left) < 700  # what flows in meanwhile is 17 a second


def test_without_limits_there_are_no_headers(http: httpx.Client) -> None:
    assert not any("ratelimit" in name for name in http.post("/v1/completions", json=PROMPT).headers)


def refusals(server: RunningServer) -> tuple[float, float]:
    """Return how many requests the server says that each limit refused."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer free"}).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_limit = {
        sample.labels["limit"]: sample.value
        for sample in samples
        if sample.name == "snapserve:rate_limited_requests_total"
    }
    return by_limit["requests"], by_limit["tokens"]


def test_keys_have_separate_rate_limits(renderer: Renderer) -> None:
    limits = {"small": RateLimit(requests=1)}
    with serve(renderer, settings(api_keys=("small", "free"), key_rate_limits=limits)) as server:

        def ask(key: str) -> openai.types.Completion:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30) as sdk:
                return sdk.completions.create(model="demo", prompt="Anna keeps", max_tokens=2)

        ask("small")
        with pytest.raises(openai.RateLimitError) as refused:
            ask("small")
        assert refused.value.type == "requests"
        for _ in range(3):
            ask("free")
        assert refusals(server) == (1, 0)


def test_a_request_reserves_its_cost_before_it_runs(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(rate_limit=RateLimit(tokens=100))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        large = http.post("/v1/completions", json=PROMPT | {"max_tokens": 30, "n": 4})
        assert (large.status_code, large.json()["error"]["type"]) == (429, "tokens")
        assert large.headers["x-should-retry"] == "false"
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        assert DEFAULT_MAX_TOKENS > 100
        assert http.post("/v1/chat/completions", json=chat).status_code == 429
        assert http.post("/v1/completions", json=PROMPT | {"max_tokens": 30}).status_code == 200
        assert not server.observed.finals[1:]
        assert refusals(server) == (0, 2)


def test_a_key_file_sets_limits_for_each_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nplain\n\nsmall requests=5\n  both\ttokens=100 requests=7\n")
    assert read_key_file(str(path), RateLimit(tokens=9)) == {
        "plain": RateLimit(None, 9),
        "small": RateLimit(5, 9),
        "both": RateLimit(7, 100),
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [("key two", "requests=N"), ("key requests=0", "at least 1"), ("key tokens=many", "'many'")],
)
def test_a_wrong_line_is_named_and_its_key_is_not(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"secret\n{line.replace('key', 'secret-key')}\n")
    with pytest.raises(OptionError, match=message) as error:
        read_key_file(str(path), RateLimit())
    assert "line 2" in str(error.value)
    assert "secret-key" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Anna"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/responses/input_tokens", {"input": "Anna"}),
    ],
)
def test_tokenizing_counts_as_a_request(renderer: Renderer, path: str, body: dict[str, object]) -> None:
    with (
        serve(renderer, settings(rate_limit=RateLimit(requests=2))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        statuses = [http.post(path, json=body).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]

"""A server with two pools: which one a request gets, and what its usage reports."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from backends.fake import slot_pool
from cache.policy import full, snapkv, snapstream, sparse
from cache.scorer import WindowScorer
from scheduler.admission import max_output_tokens
from scheduler.config import SchedulerConfig
from server.text.renderer import Renderer
from tests.server.events import data
from tests.server.serving import MODEL, RunningServer, serve, spec

POOLS = (
    slot_pool(
        2, snapstream(2, 8, 8, WindowScorer(observation_window=4)), 256
    ),  # a ring of 8, prompts of up to 18 tokens whole
    slot_pool(1, full(64), 256, "exact"),
)


@pytest.fixture(scope="module")
def running(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer, backend_spec=spec(pools=POOLS, max_model_len=256)) as server:
        yield server


def post(
    http: httpx.Client,
    num_prompt_tokens: int,
    max_tokens: int | None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    prompt = list(range(5, 5 + num_prompt_tokens))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body | options, headers=headers)


def policy_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    policy = response.json()["usage"]["cache"]["policy"]
    assert isinstance(policy, str)
    assert response.json()["usage"]["cache"]["pool"] == policy
    assert response.headers["x-cache-policy"] == response.headers["x-cache-pool"] == policy
    return policy


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "policy"),
    [
        (9, 2, "snapstream"),
        (9, 3, "exact"),
        (18, 1, "snapstream"),
        (19, 1, "exact"),
        (60, 4, "exact"),
        (60, 5, "snapstream"),
    ],
)
def test_the_length_selects_the_pool(
    http: httpx.Client, num_prompt_tokens: int, max_tokens: int, policy: str
) -> None:
    assert policy_of(post(http, num_prompt_tokens, max_tokens)) == policy


@pytest.mark.parametrize(("num_prefill_tokens", "policy"), [(18, "snapstream"), (17, "exact")])
def test_tokens_that_decode_reads_count_for_the_pool(
    http: httpx.Client, num_prefill_tokens: int, policy: str
) -> None:
    """The kept entries hold what prefill reads alone."""
    assert policy_of(post(http, 18, 1, num_prefill_tokens=num_prefill_tokens)) == policy


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "pool"), [(9, 2, "snapstream"), (9, 3, "exact"), (60, 4, "exact")]
)
def test_an_exact_request_gets_a_pool_that_loses_nothing(
    http: httpx.Client, num_prompt_tokens: int, max_tokens: int, pool: str
) -> None:
    answer = post(http, num_prompt_tokens, max_tokens, require_exact=True)
    assert policy_of(answer) == pool
    assert answer.json()["usage"]["cache"]["evicted_tokens"] == 0


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "pool", "remedy"),
    [
        (60, 5, None, "Pool exact holds up to 4 in the completion."),
        (9, 3, "snapstream", "Pool exact holds up to 55 in the completion."),
        (100, 1, None, "the longest exact sequence has 64 tokens"),
    ],
)
def test_a_request_that_no_slot_holds_exactly_is_refused(
    http: httpx.Client, num_prompt_tokens: int, max_tokens: int, pool: str | None, remedy: str
) -> None:
    named: dict[str, Any] = {} if pool is None else {"pool": pool}
    answer = post(http, num_prompt_tokens, max_tokens, require_exact=True, **named)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "require_exact",
    )
    assert remedy in error["message"]


def test_an_exact_answer_without_a_limit_ends_before_a_token_is_lost(http: httpx.Client) -> None:
    usage = post(http, 9, None, require_exact=True, pool="snapstream").json()["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["cache"]["evicted_tokens"] == 0


def test_an_answer_without_a_limit_counts_one_token(http: httpx.Client) -> None:
    assert policy_of(post(http, 10, 2)) == "exact"
    answer = post(http, 10, None)
    assert (policy_of(answer), answer.json()["usage"]["completion_tokens"]) == ("snapstream", 16)


@pytest.mark.parametrize("policy", ["snapstream", "exact"])
def test_field_and_header_choose(http: httpx.Client, policy: str) -> None:
    assert policy_of(post(http, 20, 4, cache_policy=policy)) == policy
    assert policy_of(post(http, 20, 4, {"X-Cache-Policy": policy})) == policy
    assert policy_of(post(http, 20, 4, {"X-Cache-Policy": policy}, cache_policy=policy)) == policy
    assert policy_of(post(http, 20, 4, pool=policy)) == policy
    assert policy_of(post(http, 20, 4, {"X-Cache-Pool": policy}, pool=policy, cache_policy=policy)) == policy


def test_the_outcome_is_reported(http: httpx.Client) -> None:
    """Of 30 tokens and 9 more, the last is never written: 38, which fill a slot of 18 entries."""
    answer = post(http, 30, 9, cache_policy="snapstream")
    cache = answer.json()["usage"]["cache"]
    assert (cache["kept_tokens"], cache["evicted_tokens"], cache["compression"]) == (
        18,
        20,
        round(38 / 18, 3),
    )
    headers = {
        name: answer.headers[f"x-cache-{name}"] for name in ("kept-tokens", "evicted-tokens", "compression")
    }
    assert headers == {"kept-tokens": "18", "evicted-tokens": "20", "compression": "2.111"}
    cache = post(http, 30, 9, cache_policy="exact", n=2).json()["usage"]["cache"]
    assert (cache["kept_tokens"], cache["evicted_tokens"], cache["compression"]) == (76, 0, 1.0)


def test_a_stream_begins_with_the_pool_and_ends_with_the_rest(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "prompt": list(range(5, 35)),
        "max_tokens": 9,
        "ignore_eos": True,
        "cache_policy": "snapstream",
    }
    with http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as response:
        assert response.headers["x-cache-policy"] == "snapstream"
        usage = list(data(response))[-1]["usage"]
    assert usage == post(http, 30, 9, cache_policy="snapstream").json()["usage"]


def test_prompts_of_one_request_may_go_to_different_pools(http: httpx.Client) -> None:
    answer = post(http, 0, 2, prompt=[list(range(5, 14)), list(range(5, 45)), list(range(5, 14))])
    assert policy_of(answer) == "snapstream, exact"


@pytest.mark.parametrize(
    ("num_prompt_tokens", "options", "headers", "param", "parts"),
    [
        (9, {"cache_policy": "half"}, {}, "cache_policy", ("snapstream, exact", "'half'")),
        (9, {}, {"X-Cache-Policy": "half"}, "cache_policy", ("snapstream, exact", "'half'")),
        (
            9,
            {"cache_policy": "exact"},
            {"X-Cache-Policy": "snapstream"},
            "cache_policy",
            ("'exact'", "'snapstream'"),
        ),
        (
            60,
            {"cache_policy": "exact"},
            {},
            "prompt",
            ("at most 4 in the completion", "60", "5, which needs a slot of at least 65 "),
        ),
        (
            90,
            {"cache_policy": "exact"},
            {},
            "prompt",
            ("at most 0 in the completion", "needs a slot of at least 95 entries."),
        ),
        (255, {}, {}, "prompt", ("256 tokens", "260")),
    ],
)
def test_a_request_that_its_pool_cannot_serve_is_refused(
    http: httpx.Client,
    num_prompt_tokens: int,
    options: dict[str, Any],
    headers: dict[str, str],
    param: str,
    parts: tuple[str, ...],
) -> None:
    response = post(http, num_prompt_tokens, 5, headers, **options)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert all(part in error["message"] for part in parts), error["message"]


@pytest.mark.parametrize(("num_forced", "room", "needed"), [(0, 4, 17), (3, 1, 20)])
def test_a_refusal_reports_the_required_slot_size(
    renderer: Renderer, num_forced: int, room: int, needed: int
) -> None:
    pools = (
        slot_pool(1, snapkv(max_new_tokens=4, num_kept=8, scorer=WindowScorer(observation_window=4)), 256),
    )
    kept = spec(pools=pools, max_model_len=256)
    assert max_output_tokens(60, num_forced, kept, 0) == room
    options: dict[str, Any] = {"num_prefill_tokens": 60 - num_forced} if num_forced else {}
    with serve(renderer, backend_spec=kept) as server, httpx.Client(base_url=server.url) as http:
        error = post(http, 60, 5, **options).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    parts = (
        f"at most {room} in the completion after 60",
        f"requested 5, which needs a slot of at least {needed} entries, 8 of them kept",
    )
    assert all(part in error["message"] for part in parts), error["message"]


def test_openais_client_chooses(sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Anna keeps a falcon."}]
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=3, extra_body={"cache_policy": "snapstream"}
    )
    usage = raw.parse().usage
    assert usage is not None
    assert (usage.model_extra or {})["cache"]["policy"] == raw.headers["x-cache-policy"] == "snapstream"
    chosen = sdk.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, extra_headers={"x-cache-policy": "exact"}
    )
    assert chosen.usage is not None
    assert (chosen.usage.model_extra or {})["cache"]["policy"] == "exact"


def test_metrics_have_a_label_for_each_pool(renderer: Renderer) -> None:
    with (
        serve(renderer, backend_spec=spec(pools=POOLS, max_model_len=256)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        post(http, 30, 9, cache_policy="snapstream")
        post(http, 30, 9, cache_policy="exact")
        text = http.get("/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def sample(name: str, *labels: str) -> float:
        own = ",".join(['engine="0"', f'model_name="{MODEL}"', *labels])
        return float(samples[f"{name}{{{own}}}"])

    assert (sample("snapserve:slots_total"), sample("snapserve:slot_capacity")) == (3, 18)
    assert (
        sample("snapserve:cache_entries_kept_total"),
        sample("snapserve:cache_entries_evicted_total"),
    ) == (18 + 38, 20)
    for name, num_slots, capacity, num_kept, num_evicted in (
        ("snapstream", 2, 18, 18, 20),
        ("exact", 1, 64, 38, 0),
    ):
        label = f'pool="{name}"'
        assert sample("snapserve:pool_slots_total", label) == num_slots
        assert sample("snapserve:pool_slot_capacity", label) == capacity
        assert sample("snapserve:pool_slot_bytes", label) == 0  # the fake backend's
        assert (
            sample("snapserve:pool_slots_in_use", label)
            == sample("snapserve:pool_sequences_waiting", label)
            == 0
        )
        assert sample("snapserve:pool_sequences_total", label) == 1
        assert sample("snapserve:pool_cache_entries_kept_total", label) == num_kept
        assert sample("snapserve:pool_cache_entries_evicted_total", label) == num_evicted


def test_a_sparse_pool_admits_by_length_and_counts_what_it_quantises(renderer: Renderer) -> None:
    pools = (slot_pool(1, sparse(2, 8, 30, 4), 256),)
    with (
        serve(renderer, backend_spec=spec(pools=pools, max_model_len=256)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        cache = post(http, 30, 9).json()["usage"]["cache"]
        assert (cache["kept_tokens"], cache["evicted_tokens"], cache["compression"]) == (38, 0, 1.0)
        assert cache["quantized_tokens"] == 28
        assert "quantized_tokens" not in post(http, 6, 3).json()["usage"]["cache"]
        refused = post(http, 30, 11)
        assert refused.status_code == 400
        assert "admits at most 10 in the completion" in refused.text
        assert "needs a slot of at least 41 entries" in refused.text
        [line] = [
            line
            for line in http.get("/metrics").text.splitlines()
            if line.startswith("snapserve:pool_cache_entries_quantized_total")
        ]
        assert line.endswith(" 28.0")
        assert 'pool="sparse"' in line


def test_each_pool_has_its_own_queue(renderer: Renderer) -> None:
    """Three sequences are one too many for one slot and one that waits, not for two."""
    with (
        serve(
            renderer,
            backend_spec=spec(pools=POOLS, max_model_len=256),
            config=SchedulerConfig(max_num_waiting=1),
        ) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert policy_of(post(http, 30, 9, cache_policy="exact", n=2)) == "exact"
        refused = post(http, 30, 9, cache_policy="exact", n=3)
        assert (refused.status_code, policy_of(post(http, 30, 9, cache_policy="snapstream", n=3))) == (
            429,
            "snapstream",
        )

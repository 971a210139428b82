"""What a client learns of restored prompts, and what it does not learn of other clients'."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from backends.interface import PrefixSpec
from server.options.settings import PrefixSharing
from server.text.renderer import Renderer
from tests.server.serving import MODEL, RunningServer, serve, settings, spec

PROMPT = list(range(5, 105))
PREFIXES = PrefixSpec(num_blocks=64, block_tokens=8, block_bytes=64)
KEYS = ("sk-anna", "sk-ben")
TEXT = "Anna keeps a falcon. Ben keeps a cat. Carl keeps a fox. Dora keeps a goat. What does Ben keep?"


@pytest.fixture(scope="module")
def running(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer, backend_spec=spec(prefixes=PREFIXES)) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(running: RunningServer) -> None:
    assert httpx.post(f"{running.url}/reset_prefix_cache").status_code == 200


def post(url: str, path: str = "/v1/completions", key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{url}{path}", json={"model": MODEL, "max_tokens": 2} | body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def cached(url: str, **body: Any) -> int:
    usage = post(url, **{"prompt": PROMPT, **body}).json()["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(num_cached, int)
    return num_cached


def test_usage_and_header_count_restored_tokens(running: RunningServer) -> None:
    first = post(running.url, prompt=PROMPT)
    second = post(running.url, prompt=PROMPT)
    assert first.headers["x-cache-hit-tokens"] == "0"
    assert second.headers["x-cache-hit-tokens"] == "96"
    assert second.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    assert second.json()["usage"]["prompt_tokens"] == 100


def test_the_prompt_of_several_choices_counts_once(running: RunningServer) -> None:
    assert cached(running.url, n=3) == 0
    assert cached(running.url, n=3) == 96


def test_several_prompts_are_added_up(running: RunningServer) -> None:
    assert cached(running.url, prompt=[PROMPT, PROMPT[::-1]]) == 0
    assert cached(running.url, prompt=[PROMPT, PROMPT[::-1]]) == 192


def test_a_stream_and_a_chat_report_them(running: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    for expected in (False, True):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = list(stream)[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        num_cached = usage.prompt_tokens_details.cached_tokens or 0
        assert (num_cached > 0) == expected
        assert num_cached < usage.prompt_tokens


def test_a_response_reports_them(running: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    first, second = (
        client.responses.create(model=MODEL, input=TEXT, max_output_tokens=2).usage for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.input_tokens_details.cached_tokens == 0
    assert 0 < second.input_tokens_details.cached_tokens < second.input_tokens


def test_salts_separate_prompts(running: RunningServer) -> None:
    assert cached(running.url, cache_salt="a") == 0
    assert cached(running.url, cache_salt="b") == 0
    assert cached(running.url) == 0
    assert cached(running.url, cache_salt="a") == 96


def test_a_salt_is_a_text(running: RunningServer) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "cache_salt": 5}
    response = httpx.post(f"{running.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_prompt_logprobs_read_the_whole_prompt(running: RunningServer) -> None:
    assert cached(running.url) == 0
    assert cached(running.url, prompt_logprobs=1) == 0
    assert cached(running.url, echo=True, logprobs=1) == 0


def test_a_reset_forgets(running: RunningServer) -> None:
    assert cached(running.url) == 0
    httpx.post(f"{running.url}/reset_prefix_cache").raise_for_status()
    assert cached(running.url) == 0
    assert cached(running.url) == 96


def test_metrics_count_them(running: RunningServer) -> None:
    before = samples(running.url)
    cached(running.url)
    cached(running.url)
    after = samples(running.url)
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == 200
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 96
    assert after["snapserve:prefix_cache_capacity_bytes"] == 64 * 64
    assert 0 < after["snapserve:prefix_cache_bytes"] <= 64 * 64


def samples(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {
        line.split("{")[0]: float(line.split()[-1])
        for line in lines
        if "prefix_cache" in line and line[0] != "#"
    }


@pytest.mark.parametrize("sharing", PrefixSharing)
def test_keys_share_nothing_unless_all_do(renderer: Renderer, sharing: PrefixSharing) -> None:
    options = settings(api_keys=KEYS, prefix_sharing=sharing)
    with serve(renderer, options, backend_spec=spec(prefixes=PREFIXES)) as server:
        assert cached(server.url, key=KEYS[0]) == 0
        assert cached(server.url, key=KEYS[1]) == (96 if sharing is PrefixSharing.ALL else 0)
        assert cached(server.url, key=KEYS[0]) == 96
        assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 401
        # The field `user` proves nothing: it must not lead to another key's prompts.
        assert cached(server.url, key=KEYS[1], prompt=PROMPT[1:], user="anna") == 0


def test_a_salt_cannot_be_that_of_another_key(renderer: Renderer) -> None:
    options = settings(api_keys=KEYS)
    with serve(renderer, options, backend_spec=spec(prefixes=PREFIXES)) as server:
        cached(server.url, key=KEYS[0])
        [salt] = {add.cache_salt for add in server.observed.adds}
        assert cached(server.url, key=KEYS[1], cache_salt=salt) == 0

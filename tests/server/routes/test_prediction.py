"""A chat's `prediction`, and what usage and metrics say of guessed tokens."""

from typing import Any

import httpx
import pytest

from backends.fake import slot_pool
from cache.policy import full
from scheduler.config import SchedulerConfig
from server.text.renderer import Renderer
from tests.server.metrics.test_metrics import Samples
from tests.server.serving import MODEL, serve, spec

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Where is the lamp?"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_prediction_is_verified_and_counted(renderer: Renderer, is_in_parts: bool) -> None:
    pool = slot_pool(4, full(1024), 1024, max_draft_tokens=7)
    with (
        serve(renderer, backend_spec=spec(pools=(pool,))) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        plain = http.post(PATH, json=CHAT).json()
        text = plain["choices"][0]["message"]["content"]
        content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        prediction = {"type": "content", "content": content if is_in_parts else text}
        guessed = http.post(PATH, json=CHAT | {"prediction": prediction}).json()
        assert guessed["choices"][0]["message"] == plain["choices"][0]["message"]
        server.observed.wait_until(lambda: len(server.observed.finals) == 2)
        predicted = server.observed.adds[1].prediction_token_ids
        assert b"".join(map(renderer.vocabulary.token_bytes, predicted)).decode() == text
        final = server.observed.finals[1]
        num_rejected = final.num_draft_tokens - final.num_accepted_tokens
        assert final.num_draft_tokens > 0
        assert guessed["usage"]["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": final.num_accepted_tokens,
            "rejected_prediction_tokens": num_rejected,
        }
        assert guessed["usage"]["completion_tokens"] == 24
        sample = Samples(server.observed)
        assert sample("vllm:spec_decode_num_drafts_total") > 0
        assert sample("vllm:spec_decode_num_draft_tokens_total") == final.num_draft_tokens
        assert sample("vllm:spec_decode_num_accepted_tokens_total") == final.num_accepted_tokens


def test_a_prediction_may_be_switched_off(renderer: Renderer) -> None:
    pool = slot_pool(4, full(1024), 1024, max_draft_tokens=7)
    config = SchedulerConfig(num_speculative_tokens=0)
    with (
        serve(renderer, backend_spec=spec(pools=(pool,)), config=config) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        text = http.post(PATH, json=CHAT).json()["choices"][0]["message"]["content"]
        prediction = {"type": "content", "content": text}
        details = http.post(PATH, json=CHAT | {"prediction": prediction}).json()["usage"][
            "completion_tokens_details"
        ]
        assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": "a" * 200_000}, "prediction"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "prediction"),
        ("a", "prediction"),
    ],
)
def test_a_wrong_prediction_is_named(http: httpx.Client, prediction: object, param: str) -> None:
    response = http.post(PATH, json=CHAT | {"prediction": prediction})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param), response.text

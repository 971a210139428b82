"""What vLLM's users send beyond OpenAI's API, and the routes around it."""

from typing import Any

import httpx
import pytest

from tests.conformance.api import HELLO, Api


@pytest.mark.parametrize("options", [{"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_sampling(api: Api, options: dict[str, Any]) -> None:
    """extensions: top_k, min_p and repetition_penalty"""
    assert api.chat(temperature=1, **options)["choices"]


def test_ignore_eos(api: Api) -> None:
    """extensions: ignore_eos with min_tokens"""
    answer = api.chat(ignore_eos=True, min_tokens=24, max_tokens=24)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (24, "length")


def test_stop_token_ids(api: Api) -> None:
    """extensions: stop_token_ids"""
    assert api.chat(stop_token_ids=[5])["choices"]


def test_prompt_logprobs(api: Api) -> None:
    """extensions: prompt_logprobs"""
    answer = api.complete(prompt=[5, 6, 7, 8], prompt_logprobs=1)
    logprobs = answer["choices"][0].get("prompt_logprobs") or answer["prompt_logprobs"]
    assert len(logprobs) == 4
    assert logprobs[0] is None


def test_structured_outputs(api: Api) -> None:
    """extensions: structured_outputs choice and regex"""
    for form in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}):
        assert api.chat(structured_outputs=form, max_tokens=20)["choices"][0]["message"]["content"] in (
            "yes",
            "no",
        )


def test_tokenize(api: Api) -> None:
    """extensions: tokenize and detokenize"""
    tokens = api.post("/tokenize", prompt="Hello world", add_special_tokens=False)["tokens"]
    assert api.post("/detokenize", tokens=tokens)["prompt"] == "Hello world"


def test_context_length(api: Api) -> None:
    """extensions: a model reports its max_model_len"""
    model = next(model for model in api.get("/v1/models")["data"] if model["id"] == api.model)
    if "max_model_len" not in model:
        pytest.skip("unsupported: no max_model_len")
    assert model["max_model_len"] > 0


def test_health(api: Api) -> None:
    """service: /health"""
    response = api.http.get("/health")
    assert response.status_code == 200


def test_ready(api: Api) -> None:
    """service: /ready"""
    response = api.http.get("/ready")
    if response.status_code == 404:
        pytest.skip("unsupported: no /ready")
    assert response.status_code == 200


def test_metrics(api: Api) -> None:
    """service: /metrics for Prometheus"""
    response = api.http.get("/metrics")
    if response.status_code == 404:
        pytest.skip("unsupported: no /metrics")
    assert "# TYPE" in response.text


def test_request_id(api: Api) -> None:
    """service: x-request-id is given back"""
    response = api.http.post(
        "/v1/chat/completions",
        json={"model": api.model, "messages": HELLO, "max_tokens": 1},
        headers={"x-request-id": "abc-123"},
    )
    if "x-request-id" not in response.headers:
        pytest.skip("unsupported: no x-request-id")
    assert response.headers["x-request-id"]


def test_keys(api: Api, base_url: str) -> None:
    """service: without the right key, 401 in OpenAI's form"""
    response = httpx.post(
        f"{base_url}/v1/chat/completions", json={"model": api.model, "messages": HELLO, "max_tokens": 1}
    )
    if response.status_code == 200:
        pytest.skip("unsupported: this server is open to all")
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"

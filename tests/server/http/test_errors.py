"""Errors of any origin have OpenAI's shape, and contain nothing internal."""

import httpx
import pytest

from backends.interface import BackendError, BackendUnusableError
from scheduler.messages import Final, FinishReason, Timing
from server.engine.client import Health, HealthStatus, QueueFullError, UnavailableError
from server.generation.events import GenerationError
from server.generation.failures import as_api_error
from server.http.errors import ApiError
from server.state.interface import StateError
from server.text.renderer import Renderer
from tests.server.serving import MODEL, serve, spec

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_unknown_urls_and_methods(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = http.request(method, path, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    if status == 405:
        assert response.headers["allow"]


def test_a_failed_step_is_an_internal_error_without_details(renderer: Renderer) -> None:
    with (
        serve(
            renderer,
            backend_spec=spec(max_decode_steps=1),
            faults=dict.fromkeys((2, 3), BackendError("secret 0x7f00")),
        ) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        response = http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_dead_engine_is_seen_by_everybody(renderer: Renderer) -> None:
    with (
        serve(
            renderer, backend_spec=spec(max_decode_steps=1), faults={2: BackendUnusableError("secret 0x7f00")}
        ) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        first = http.post("/v1/chat/completions", json=CHAT)
        second = http.post("/v1/chat/completions", json=CHAT)
        assert (first.status_code, second.status_code) == (500, 503)
        assert second.json()["error"]["code"] == "engine_dead"
        assert second.headers["retry-after"]
        assert [http.get(path).status_code for path in ("/health", "/ready", "/version")] == [503, 503, 200]
        assert "secret" not in first.text + second.text + http.get("/health").text


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFullError(2, 10, 11), 429, "rate_limit_exceeded", True),
        (QueueFullError(12, 0, 11), 400, "invalid_value", False),
        (UnavailableError(Health(HealthStatus.LOADING)), 503, "model_loading", True),
        (UnavailableError(Health(HealthStatus.DRAINING)), 503, "server_shutting_down", True),
        (UnavailableError(Health(HealthStatus.DEAD, "secret")), 503, "engine_dead", True),
        (StateError("secret"), 503, "state_unavailable", True),
        (ValueError("secret"), 500, "internal_error", False),
        (KeyError("secret"), 500, "internal_error", False),
    ],
)
def test_exceptions(error: Exception, status: int, code: str, retry_after: bool) -> None:
    api_error = as_api_error(error)
    assert (api_error.status, api_error.code, "Retry-After" in api_error.headers) == (
        status,
        code,
        retry_after,
    )
    assert "secret" not in api_error.message


def test_the_error_of_the_state_suits_redis_and_a_file() -> None:
    message = as_api_error(StateError("disk I/O error")).message
    assert message == "The server cannot use the shared state of stored responses. Please try later."


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.REJECTED, 400, "invalid_value"),
        (FinishReason.QUEUE_FULL, 429, "rate_limit_exceeded"),
        (FinishReason.QUEUE_TIMEOUT, 429, "queue_timeout"),
        (FinishReason.TIMEOUT, 408, "request_timeout"),
        (FinishReason.ABORT, 503, "server_shutting_down"),
        (FinishReason.ERROR, 500, "internal_error"),
    ],
)
def test_the_ends_of_sequences_that_are_errors(reason: FinishReason, status: int, code: str) -> None:
    api_error = as_api_error(GenerationError(Final(reason, Timing(0.0, None, None, 1.0), 3, 0)))
    assert (api_error.status, api_error.code) == (status, code)


def test_a_message_can_quote_a_lone_surrogate() -> None:
    assert b"\\ud800" in ApiError(400, "unknown_parameter", "Unknown parameter: '\ud800'.").response().body

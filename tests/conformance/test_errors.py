"""Errors that clients understand: OpenAI's statuses and bodies."""

from typing import Any

import pytest

from tests.conformance.api import HELLO, Api, error_of

CHAT = "/v1/chat/completions"
BAD: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "messages of the wrong type": {"messages": "hello"},
    "temperature out of range": {"messages": HELLO, "temperature": 3},
    "top_p out of range": {"messages": HELLO, "top_p": 2},
    "n of 0": {"messages": HELLO, "n": 0},
    "negative max_tokens": {"messages": HELLO, "max_tokens": -1},
    "top_logprobs without logprobs": {"messages": HELLO, "top_logprobs": 2},
    "top_logprobs above 20": {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
    "stream_options without stream": {"messages": HELLO, "stream_options": {"include_usage": True}},
    "tool_choice without tools": {"messages": HELLO, "tool_choice": "required"},
    "logit_bias of a word": {"messages": HELLO, "logit_bias": {"hello": 1}},
    "a role that there is not": {"messages": [{"role": "wizard", "content": "hello"}]},
    "a schema that is none": {
        "messages": HELLO,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        },
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_value(api: Api, case: str) -> None:
    """errors: a bad value is a 400 in OpenAI's form"""
    api.refuses(CHAT, 400, **BAD[case])


def test_an_unknown_model_is_refused(api: Api) -> None:
    """errors: an unknown model is a 404"""
    assert api.refuses(CHAT, 404, model="no-such-model-anywhere", messages=HELLO)["code"] == "model_not_found"


def test_too_long(api: Api) -> None:
    """errors: a prompt that is too long is context_length_exceeded"""
    error = api.refuses(CHAT, 400, messages=[{"role": "user", "content": "word " * 150_000}])
    assert error["code"] == "context_length_exceeded"


def test_broken_json(api: Api) -> None:
    """errors: broken JSON is a 400"""
    response = api.http.post(CHAT, content=b'{"messages": [', headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_not_a_number(api: Api) -> None:
    """errors: NaN and infinities are a 400"""
    for number in ("NaN", "Infinity", "1e999"):
        text = (
            f'{{"model": "{api.model}", "messages": [{{"role": "user", "content": "a"}}], '
            f'"temperature": {number}}}'
        )
        response = api.http.post(CHAT, content=text.encode(), headers={"content-type": "application/json"})
        assert response.status_code == 400, number
        error_of(response)


def test_no_route(api: Api) -> None:
    """errors: a route that there is not is a 404 in OpenAI's form"""
    response = api.http.get("/v1/nothing/here")
    assert response.status_code == 404
    error_of(response)


def test_streamed_refusal(api: Api) -> None:
    """errors: a bad request is refused before its stream begins"""
    api.refuses(CHAT, 400, messages=HELLO, stream=True, temperature=3)

"""Prompts and answers as token ids: beside text, in place of names, and truncated prompts."""

from typing import Any

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.events import data
from tests.server.serving import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
TURNS = [{"role": "user", "content": "Who keeps the lamp? 媽"}]
BODIES = {CHAT: ASKED | {"messages": TURNS}, COMPLETIONS: ASKED | {"prompt": "Anna keeps 媽"}}


def ask(http: httpx.Client, path: str, **options: Any) -> Any:
    response = http.post(path, json=BODIES[path] | options)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str, **options: Any) -> list[Any]:
    with http.stream("POST", path, json=BODIES[path] | {"stream": True} | options) as response:
        assert response.status_code == 200
        return list(data(response))


def test_a_completion_returns_its_token_ids(http: httpx.Client, renderer: Renderer) -> None:
    prompt = http.post("/tokenize", json={"prompt": "Anna keeps 媽"}).json()["tokens"]
    for choice in ask(http, COMPLETIONS, return_token_ids=True, n=2)["choices"]:
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 6
        assert renderer.vocabulary.decode(choice["token_ids"]) == choice["text"]


def test_a_chat_returns_its_token_ids(http: httpx.Client) -> None:
    prompt = http.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
    answer = ask(http, CHAT, return_token_ids=True)
    assert (answer["prompt_token_ids"], len(answer["choices"][0]["token_ids"])) == (prompt, 6)


def test_a_stop_token_is_among_them(http: httpx.Client) -> None:
    first = ask(http, COMPLETIONS, return_token_ids=True)["choices"][0]["token_ids"]
    [choice] = ask(http, COMPLETIONS, return_token_ids=True, stop_token_ids=[first[3]])["choices"]
    assert choice["token_ids"] == first[: first.index(first[3]) + 1]


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"logprobs": 1}, {"n": 2}])
def test_a_streamed_completion_returns_the_same_ids(http: httpx.Client, options: dict[str, Any]) -> None:
    whole = ask(http, COMPLETIONS, return_token_ids=True, **options)
    chunks = [chunk["choices"][0] for chunk in stream(http, COMPLETIONS, return_token_ids=True, **options)]
    for choice in whole["choices"]:
        pieces = [piece for piece in chunks if piece["index"] == choice["index"]]
        assert [piece.get("prompt_token_ids") for piece in pieces] == [choice["prompt_token_ids"]] + [
            None
        ] * (len(pieces) - 1)
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"n": 2}])
def test_a_streamed_chat_returns_the_same_ids(http: httpx.Client, options: dict[str, Any]) -> None:
    whole = ask(http, CHAT, return_token_ids=True, **options)
    chunks = stream(http, CHAT, return_token_ids=True, **options)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [whole["prompt_token_ids"]] + [None] * (
        len(chunks) - 1
    )
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece.get("token_ids", ())] == choice["token_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_are_null_unless_requested(http: httpx.Client, path: str) -> None:
    answer = ask(http, path)
    item = answer if path == CHAT else answer["choices"][0]
    assert (item["prompt_token_ids"], item["prompt_logprobs"], answer["choices"][0]["token_ids"]) == (
        None,
        None,
        None,
    )
    assert all("token_ids" not in chunk["choices"][0] for chunk in stream(http, path))


def test_log_probabilities_may_name_tokens_by_their_ids(http: httpx.Client) -> None:
    [choice] = ask(
        http, COMPLETIONS, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=2, echo=True
    )["choices"]
    names = [f"token_id:{token}" for token in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(
        name in top for name, top in zip(names[1:], choice["logprobs"]["top_logprobs"][1:], strict=True)
    )
    by_text = ask(http, COMPLETIONS, logprobs=2, echo=True)["choices"][0]["logprobs"]
    assert choice["logprobs"]["text_offset"] == by_text["text_offset"]
    [choice] = ask(
        http, CHAT, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=True, top_logprobs=1
    )["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]


def test_a_prompt_is_truncated_on_the_requested_side(http: httpx.Client) -> None:
    for side, kept in (
        ({}, [8, 9]),
        ({"truncation_side": "left"}, [8, 9]),
        ({"truncation_side": "right"}, [5, 6]),
    ):
        options = {"truncate_prompt_tokens": 2, "return_token_ids": True, "echo": True, **side}
        answer = ask(http, COMPLETIONS, prompt=[5, 6, 7, 8, 9], **options)
        [choice] = answer["choices"]
        assert (choice["prompt_token_ids"], answer["usage"]["prompt_tokens"]) == (kept, 2)
        assert choice["text"].startswith(http.post("/detokenize", json={"tokens": kept}).json()["prompt"])
    assert ask(http, COMPLETIONS, truncate_prompt_tokens=5000)["usage"] == ask(http, COMPLETIONS)["usage"]
    assert ask(http, CHAT, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3


def test_a_truncated_prompt_may_exceed_the_context(http: httpx.Client) -> None:
    assert (
        ask(http, COMPLETIONS, prompt=[5] * 3000, truncate_prompt_tokens=100)["usage"]["prompt_tokens"] == 100
    )

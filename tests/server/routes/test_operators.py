"""What operators ask, and SageMaker's route, which answers as the others do."""

from typing import Any

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.serving import serve

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


def test_the_server_describes_itself(http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    info = http.get("/server_info").json()
    assert (info["model"], info["max_model_len"]) == ("demo", 1024)
    assert info["pools"][0]["num_slots"] > 0
    assert info["version"] == http.get("/version").json()["version"]
    props = http.get("/props").json()
    assert props["total_slots"] == sum(pool["num_slots"] for pool in info["pools"])
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert "messages" in props["chat_template"]


def test_load_counts_what_runs(renderer: Renderer) -> None:
    body = CHAT | {"stream": True}
    with (
        serve(renderer, is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        server.gate.let(1)
        with http.stream("POST", "/v1/chat/completions", json=body):
            assert http.get("/load").json()["server_load"] == 1
            server.gate.open()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "temperature": 0}),
        ("/v1/embeddings", {"input": "Hello"}),
    ],
)
def test_invocations_are_answered_by_their_fields(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    def same(answer: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in answer.items() if key not in ("id", "created")}

    invoked = http.post("/invocations", json=body | {"unknown": 1})
    assert invoked.headers["x-ignored-parameters"] == "unknown"
    assert same(invoked.json()) == same(http.post(path, json=body).json())


def test_wrong_invocations_are_refused_by_name(http: httpx.Client) -> None:
    wrong = http.post("/invocations", json=CHAT | {"temperature": "hot"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
    assert http.post("/invocations", json={}).json()["error"]["param"] == "input"
    assert http.post("/invocations", json=[]).status_code == 400


def test_a_chat_is_rendered_as_it_is_read(http: httpx.Client) -> None:
    rendered = http.post("/v1/chat/completions/render", json=CHAT).json()
    tokens = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert rendered["prompt_token_ids"] == tokens
    assert rendered["prompt"] == http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert http.post("/v1/chat/completions/render", json=CHAT | {"model": "other"}).status_code == 404

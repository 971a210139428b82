"""Routes under the names that clients of other servers call."""

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.serving import MODEL, serve, settings

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/embeddings", {"input": "Hello"}),
    ],
)
def test_a_base_url_may_lack_its_version(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["object"]) == (
        200,
        http.post(f"/v1{path}", json=body).json()["object"],
    )


def test_models_without_the_version(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.get(f"/models/{MODEL}").json() == http.get(f"/v1/models/{MODEL}").json()


def test_token_routes_with_the_version(http: httpx.Client) -> None:
    tokens = http.post("/v1/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    assert (
        http.post("/v1/detokenize", json={"tokens": tokens}).json()
        == http.post("/detokenize", json={"tokens": tokens}).json()
    )


@pytest.mark.parametrize(
    "path", ["/completion", "/chat", "/v1", "/v1/v1/models", "/modelsx", "/v1/ping", "//models"]
)
def test_nothing_else_has_another_name(http: httpx.Client, path: str) -> None:
    url = f"{str(http.base_url).rstrip('/')}{path}"  # whole, because httpx takes //models for a host
    assert http.get(url).status_code == 404


def test_another_name_is_as_guarded(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("a-key",))) as server:
        assert [httpx.get(server.url + path).status_code for path in ("/ping", "/v1/health")] == [200, 200]
        assert [httpx.get(server.url + path).status_code for path in ("/models", "/responses/resp_1")] == [
            401,
            401,
        ]
        assert httpx.post(f"{server.url}/v1/tokenize", json={"prompt": "a"}).status_code == 401


def test_a_slash_at_the_end_changes_nothing(http: httpx.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert http.post("/v1/chat/completions/", json=body).status_code == 200
    assert http.get("/").headers["content-type"].startswith("text/html")


def test_probes_answer_head(http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling"])
def test_a_route_that_is_not_served_names_what_is(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 404
    assert "/v1/embeddings" in answer.json()["error"]["message"]

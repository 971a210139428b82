"""Answers held against the schema that the server itself serves."""

from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
ITEM_TOOL = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
POSTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 30, "tools": [TOOL], "tool_choice": "required"},
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": ["Hello", "you"], "max_tokens": 4, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "prompt_logprobs": 1, "stop": "e"}),
    ("/v1/embeddings", {"input": ["one", "two"]}),
    ("/v1/embeddings", {"input": "one", "encoding_format": "base64", "dimensions": 4}),
    (
        "/v1/responses",
        {
            "input": "Hello",
            "max_output_tokens": 16,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hello",
            "max_output_tokens": 30,
            "tools": [ITEM_TOOL],
            "tool_choice": "required",
            "store": False,
        },
    ),
    (
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 16, "background": True, "metadata": {"a": "b"}},
    ),
    ("/v1/responses/input_tokens", {"input": "Hello"}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"messages": MESSAGES, "return_token_strs": True}),
    ("/detokenize", {"tokens": [40, 41]}),
]
GETS = ("/v1/models", "/health", "/ready", "/version", "/tokenizer_info")


@pytest.fixture
def document(http: httpx.Client) -> Any:
    return http.get("/openapi.json").json()


def check(document: Any, operation: tuple[str, str], response: httpx.Response) -> Any:
    """Hold an answer against what is declared for it, which must say something; return its body."""
    assert response.status_code == 200, response.text
    path, method = operation
    schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema, f"{method} {path} declares nothing"
    body = response.json()
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)
    return body


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_generated_requests_follow_our_schema(
    http: httpx.Client, document: Any, path: str, body: dict[str, Any]
) -> None:
    check(document, (path, "post"), http.post(path, json=body))


@pytest.mark.parametrize("path", GETS)
def test_answers_follow_our_schema(http: httpx.Client, document: Any, path: str) -> None:
    check(document, (path, "get"), http.get(path))


def test_the_life_of_a_response(http: httpx.Client, document: Any) -> None:
    made = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16}).json()
    path, template = f"/v1/responses/{made['id']}", "/v1/responses/{response_id}"
    assert check(document, (template, "get"), http.get(path)) == made
    check(document, (f"{template}/input_items", "get"), http.get(f"{path}/input_items"))
    check(document, (template, "delete"), http.delete(path))


def test_a_wrong_answer_would_be_noticed(document: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(document, ("/v1/chat/completions", "post"), httpx.Response(200, json={"id": 3}))


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/v1/chat/completions", "text/event-stream"),
        ("/v1/completions", "text/event-stream"),
        ("/v1/responses", "text/event-stream"),
        ("/v1/messages", "text/event-stream"),
        ("/api/chat", "application/x-ndjson"),
        ("/api/generate", "application/x-ndjson"),
    ],
)
def test_streams_are_described_by_their_media_type(http: httpx.Client, path: str, media_type: str) -> None:
    described = http.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(described) == {"application/json", media_type}
    assert "$ref" in described["application/json"]["schema"]
    field = "input" if path == "/v1/responses" else "prompt"
    asked = {"messages": [{"role": "user", "content": "x"}]} if path != "/v1/responses" else {}
    limits = {"max_tokens": 16, "options": {"num_predict": 1}}
    body = asked | limits | {"stream": True} | ({} if path == "/v1/messages" else {field: "x"})
    answer = http.post(path, json=body)
    assert answer.headers["content-type"].partition(";")[0] == media_type

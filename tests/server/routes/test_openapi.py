"""Answers validated by OpenAI's published schema, the JSON file in SNAPSERVE_OPENAI_SCHEMA."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from server.text.renderer import Renderer
from tests.server.batches.inputs import CHAT as CHAT_PATH
from tests.server.batches.inputs import batches_in, client, jsonl, line
from tests.server.events import data
from tests.server.serving import serve

pytestmark = pytest.mark.openai_schema

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
}
COMPLETION: dict[str, Any] = {"prompt": ["Hello", "you"], "max_tokens": 4, "logprobs": 2}


@pytest.fixture(scope="module")
def document() -> Any:
    path = os.environ.get("SNAPSERVE_OPENAI_SCHEMA")
    if path is None:
        pytest.skip("SNAPSERVE_OPENAI_SCHEMA does not say where OpenAI's schema is")
    return json.loads(Path(path).read_text())


def check(document: Any, name: str, value: Any) -> None:
    """Validate as JSON Schema; `nullable`, of OpenAPI 3.0, is spelt out first."""
    schema = with_null({"$ref": f"#/components/schemas/{name}", "components": document["components"]})
    jsonschema.Draft202012Validator(schema).validate(value)


def with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: with_null(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def test_chat(http: httpx.Client, document: Any) -> None:
    check(document, "CreateChatCompletionResponse", http.post("/v1/chat/completions", json=CHAT).json())


def test_chat_chunks(http: httpx.Client, document: Any) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = list(data(response))
    assert len(chunks) > 4
    for chunk in chunks:
        check(document, "CreateChatCompletionStreamResponse", chunk)


def test_completions(http: httpx.Client, document: Any) -> None:
    check(document, "CreateCompletionResponse", http.post("/v1/completions", json=COMPLETION).json())


def test_embeddings(http: httpx.Client, document: Any) -> None:
    check(
        document,
        "CreateEmbeddingResponse",
        http.post("/v1/embeddings", json={"input": ["one", "two"]}).json(),
    )


def test_models(http: httpx.Client, document: Any) -> None:
    check(document, "ListModelsResponse", http.get("/v1/models").json())
    check(document, "Model", http.get("/v1/models/demo").json())


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"model": "other", "messages": CHAT["messages"]}])
def test_errors(http: httpx.Client, document: Any, body: dict[str, Any]) -> None:
    check(document, "ErrorResponse", http.post("/v1/chat/completions", json=body).json())


def test_files_and_batches(renderer: Renderer, document: Any, tmp_path: Path) -> None:
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, batches=batches) as server,
        client(server) as sdk,
    ):
        contents = (jsonl([line("right"), line("wrong", temperature=9)]), b"no line")
        files = [sdk.files.create(file=("in", content), purpose="batch") for content in contents]
        made = [
            sdk.batches.create(input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h")
            for file in files
        ]
        with httpx.Client(base_url=server.url, timeout=30) as http:
            for batch in made:
                while (now := http.get(f"/v1/batches/{batch.id}").json())["status"] not in (
                    "completed",
                    "failed",
                ):
                    check(document, "Batch", now)
                check(document, "Batch", now)
            check(document, "ListBatchesResponse", http.get("/v1/batches").json())
            for query in ("", "?limit=1", "?purpose=batch_output", "?purpose=vision"):
                check(document, "ListFilesResponse", http.get(f"/v1/files{query}").json())
            check(document, "OpenAIFile", http.get(f"/v1/files/{now['input_file_id']}").json())
            check(document, "DeleteFileResponse", http.delete(f"/v1/files/{now['input_file_id']}").json())
            check(document, "ErrorResponse", http.get("/v1/files/none").json())

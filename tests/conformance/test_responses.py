"""`/v1/responses`, `/v1/files` and `/v1/batches`."""

import json
import time
from typing import Any

from tests.conformance.api import NO_ROUTE, Api

PATH = "/v1/responses"
BATCH_LIMIT = 120.0  # seconds


def respond(api: Api, **body: Any) -> Any:
    return api.post(
        PATH, **({"input": "Say hello to the world.", "max_output_tokens": 16, "temperature": 0} | body)
    )


def text_of(response: Any) -> str:
    contents = [
        content for item in response["output"] if item["type"] == "message" for content in item["content"]
    ]
    return "".join(content["text"] for content in contents if content["type"] == "output_text")


def test_answer(api: Api) -> None:
    """responses: an answer's form"""
    answer = respond(api)
    assert answer["object"] == "response"
    assert answer["status"] in ("completed", "incomplete")
    assert (
        answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == answer["usage"]["total_tokens"]
    )
    assert any(item["type"] == "message" and item["role"] == "assistant" for item in answer["output"])


def test_stream(api: Api) -> None:
    """responses: typed events, numbered, in order"""
    with api.streaming(
        PATH, input="Say hello to the world.", max_output_tokens=16, temperature=0
    ) as response:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == text_of(events[-1]["response"])
    for begun, ended in (
        ("output_item.added", "output_item.done"),
        ("content_part.added", "content_part.done"),
    ):
        assert kinds.count(f"response.{begun}") == kinds.count(f"response.{ended}") > 0


def test_previous(api: Api) -> None:
    """responses: previous_response_id carries the conversation on"""
    first = respond(api)
    second = respond(api, input="And again?", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]


def test_stored(api: Api) -> None:
    """responses: retrieve and delete"""
    answer = respond(api)
    assert api.get(f"{PATH}/{answer['id']}")["id"] == answer["id"]
    assert api.success(api.http.delete(f"{PATH}/{answer['id']}"))["deleted"] is True
    assert api.http.get(f"{PATH}/{answer['id']}").status_code == 404


def test_structured(api: Api) -> None:
    """responses: text.format json_schema"""
    schema = {
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "level", "schema": schema, "strict": True}
    assert json.loads(text_of(respond(api, text={"format": form}, max_output_tokens=300)))["level"] in (
        "low",
        "high",
    )


def test_files(api: Api) -> None:
    """files: upload, retrieve, list, content and delete"""
    uploaded = upload(api, b'{"a": 1}\n')
    assert api.get(f"/v1/files/{uploaded['id']}")["bytes"] == 9
    assert uploaded["id"] in [item["id"] for item in api.get("/v1/files")["data"]]
    assert api.http.get(f"/v1/files/{uploaded['id']}/content").content == b'{"a": 1}\n'
    assert api.success(api.http.delete(f"/v1/files/{uploaded['id']}"))["deleted"] is True


def test_batches(api: Api) -> None:
    """batches: every line answered once"""
    bodies = [
        {"model": api.model, "messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 4}
        for number in range(5)
    ]
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    uploaded = upload(api, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    response = api.http.post(
        "/v1/batches",
        json={
            "input_file_id": uploaded["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    )
    batch = api.success(response)
    end = time.monotonic() + BATCH_LIMIT
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end, batch
        time.sleep(0.2)
        batch = api.get(f"/v1/batches/{batch['id']}")
    assert batch["status"] == "completed", batch
    answers = [
        json.loads(line)
        for line in api.http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    ]
    assert sorted(answer["custom_id"] for answer in answers) == [line["custom_id"] for line in lines]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)


def upload(api: Api, content: bytes) -> Any:
    response = api.http.post("/v1/files", files={"file": ("input.jsonl", content)}, data={"purpose": "batch"})
    if response.status_code in NO_ROUTE:
        api.success(response)
    return api.success(response)

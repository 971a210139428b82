"""Asks for responses, checks that each is what the SDK expects, and compares them."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.events import blocks
from tests.server.serving import MODEL

PATH = "/v1/responses"
HELLO: dict[str, Any] = {
    "model": MODEL,
    "input": "Where is the lamp?",
    "max_output_tokens": 8,
    "ignore_eos": True,
}

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(http: httpx.Client, body: dict[str, Any] = HELLO, **options: Any) -> Any:
    response = http.post(PATH, json=body | options)
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    return response.json()


def stream(
    http: httpx.Client,
    body: dict[str, Any] = HELLO,
    *,
    once_begun: Callable[[], None] | None = None,
    **options: Any,
) -> list[Any]:
    events: list[Any] = []
    with http.stream("POST", PATH, json=body | {"stream": True} | options) as response:
        assert response.status_code == 200
        for block in blocks(response):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            _EVENTS.validate_json(data.removeprefix("data: "), strict=True)
            if once_begun is not None and not events:
                once_begun()
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def names(events: list[Any]) -> list[str]:
    """Return the events' types, each run of deltas as one."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [
        name
        for number, name in enumerate(types)
        if not (name.endswith(".delta") and name == types[number - 1])
    ]


def text_of(response: Any) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def same(response: Any) -> Any:
    """Return what two answers to one request have in common: everything but names and times."""
    output = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    return output, response["usage"], response["status"], response["incomplete_details"]

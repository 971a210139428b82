"""Calls of SmolLM2, whose template knows no tools: they are listed as text, and calls can be enforced."""

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.process import Server
from tests.server.events import data

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The forecast of a city", "parameters": SCHEMA},
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time of day"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather in Oslo for the next 3 days, in celsius?"}],
    "tools": [WEATHER, TIME],
    "temperature": 0,
    "max_tokens": 80,
}


Answer = tuple[str | None, list[tuple[str, str]]]  # its text, and each call's name and arguments


def answer(http: httpx.Client, body: dict[str, Any]) -> Answer:
    [choice] = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"], [(call["name"], call["arguments"]) for call in calls]


def streamed_answer(http: httpx.Client, body: dict[str, Any]) -> Answer:
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in data(http.post("/v1/chat/completions", json=body | {"stream": True}))
    ]
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        name, arguments = calls.get(call["index"], ("", ""))
        function = call["function"]
        calls[call["index"]] = name + function.get("name", ""), arguments + function.get("arguments", "")
    return "".join(delta.get("content") or "" for delta in deltas), list(calls.values())


@pytest.mark.long
def test_smollm2_calls_functions(smollm2_server: Server) -> None:
    """Asked in one piece or streamed: what differs between the two is tested with a smaller model."""
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    with httpx.Client(base_url=smollm2_server.url, timeout=120) as http:
        for ask, options in (
            (answer, required | {"tools": [WEATHER]}),
            (streamed_answer, {"tool_choice": NAMED}),
            (streamed_answer, required | {"temperature": 1, "seed": 3}),
        ):
            content, calls = ask(http, BODY | options)
            assert not content
            [(name, arguments)] = calls
            assert name in ("get_weather", "get_time")
            jsonschema.validate(
                json.loads(arguments), SCHEMA if name == "get_weather" else {"maxProperties": 0}
            )
        # What it does by itself is its own choice: words, or calls of offered functions with JSON arguments.
        content, calls = streamed_answer(http, BODY | {"tool_choice": "auto"})
        assert content or calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        # The result of a call comes back as text, and is answered in words.
        call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        turns = [
            *BODY["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "It is 7 degrees and rainy in Oslo."},
        ]
        content, calls = answer(http, BODY | {"messages": turns, "tool_choice": "none"})
        assert content
        assert not calls

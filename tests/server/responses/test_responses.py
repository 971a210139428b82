"""`/v1/responses` over HTTP: bodies, events and their order, what is refused, the SDK."""

import json
from collections.abc import Iterator
from typing import Any, Literal, cast

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from backends.interface import BackendError
from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.responses.requests import HELLO, PATH, ask, names, same, stream, text_of
from tests.server.routes.test_openapi import check, document  # noqa: F401 (a fixture)
from tests.server.routes.test_tools import SCHEMA, TEMPLATE
from tests.server.serving import MODEL, RunningServer, serve, spec

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Forecast",
    "parameters": SCHEMA,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time"}
CALL: dict[str, Any] = {
    "input": "How is the weather?",
    "tools": [WEATHER, TIME],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 400,
    "temperature": 1.5,
    "seed": 3,
}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningServer]:
    """A server whose model reasons and knows tools."""
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE.replace(
        "{% if enable_thinking %}<think>", "{% if reasoning_effort %}<think>"
    )
    own = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    with serve(own) as server:
        yield server
    own.close()


TEXT_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


def test_a_response_has_its_documented_fields(http: httpx.Client) -> None:
    response = ask(http, metadata={"a": "b"}, instructions="Be brief.", user="me")
    assert response["id"].startswith("resp_")
    assert (response["object"], response["model"], response["status"]) == ("response", MODEL, "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    [message] = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
    assert response["usage"]["output_tokens"] == 8
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 8
    echoed = {
        name: response[name] for name in ("metadata", "instructions", "user", "max_output_tokens", "store")
    }
    assert echoed == {
        "metadata": {"a": "b"},
        "instructions": "Be brief.",
        "user": "me",
        "max_output_tokens": 8,
        "store": True,
    }


def test_neutral_values_change_nothing(http: httpx.Client) -> None:
    """The values with which the published tests of OpenAI's library fill in what is optional."""
    inert: dict[str, Any] = {
        "access_programs": {"cyber": "standard"},
        "image": {"context_compression": "auto"},
        "max_tool_calls": 0,
        "parallel_tool_calls": True,
        "prompt_cache_key": "key-1234",
        "prompt_cache_options": {
            "comparison_response_id": "resp_123",
            "mode": "implicit",
            "prewarm": False,
            "ttl": "30m",
        },
        "prompt_cache_retention": "in_memory",
        "reasoning": {
            "context": "auto",
            "effort": "none",
            "generate_summary": "auto",
            "mode": "standard",
            "summary": "auto",
        },
        "safety_identifier": "someone",
        "service_tier": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    assert same(ask(http, temperature=0, **inert)) == same(ask(http, temperature=0))
    tool = {**TIME, "allowed_callers": ["direct"], "async": False, "defer_loading": False}
    assert same(ask(http, temperature=0, tools=[tool])) == same(ask(http, temperature=0, tools=[TIME]))


def test_an_answer_that_ends_is_completed(http: httpx.Client, renderer: Renderer) -> None:
    [eos] = renderer.stop_token_ids
    response = ask(http, ignore_eos=False, logit_bias={str(eos): 100}, temperature=0)
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert response["completed_at"] >= response["created_at"]
    assert text_of(response) == ""


def test_equal_messages_give_the_prompt_of_a_chat(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the lamp?"}]
    chat = http.post(
        "/v1/chat/completions",
        json={"messages": messages, "max_tokens": 8, "ignore_eos": True, "temperature": 0},
    ).json()
    parts = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": HELLO["input"]},
    ]
    for options in ({"instructions": "Be brief."}, {"input": parts}):
        response = ask(http, temperature=0, **options)
        assert text_of(response) == chat["choices"][0]["message"]["content"]
        assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_stream_equals_the_unstreamed_answer_in_openais_order(http: httpx.Client) -> None:
    whole, events = ask(http, temperature=0, **LOGPROBS), stream(http, temperature=0, **LOGPROBS)
    assert names(events) == ["created", "in_progress", *TEXT_EVENTS, "incomplete"]
    assert same(events[-1]["response"]) == same(whole)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text_of(whole)
    [part] = whole["output"][0]["content"]
    assert [token for event in deltas for token in event["logprobs"]] == part["logprobs"]
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    assert all(len(token["top_logprobs"]) == 2 for token in part["logprobs"])


def test_calls_are_items_streamed_and_whole(http: httpx.Client) -> None:
    whole, events = ask(http, CALL), stream(http, CALL)
    assert names(events) == ["created", "in_progress", *CALL_EVENTS, "completed"]
    assert same(events[-1]["response"]) == same(whole)
    [call] = whole["output"]
    assert (call["type"], call["status"]) == ("function_call", "completed")
    arguments = "".join(
        event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"
    )
    assert arguments == call["arguments"]
    if call["name"] == "get_weather":
        jsonschema.validate(json.loads(arguments), SCHEMA)
    several = ask(http, CALL, parallel_tool_calls=True, seed=4)
    assert all(item["type"] == "function_call" for item in several["output"])


def test_the_choice_of_tools_is_honoured(http: httpx.Client) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    for choice in (allowed, {"type": "function", "name": "get_time"}):
        for seed in range(4):
            response = ask(http, CALL, tool_choice=choice, seed=seed)
            assert [item["name"] for item in response["output"]] == ["get_time"]
            assert response["tool_choice"] == choice
    none = ask(http, CALL, tool_choice="none", max_output_tokens=4)
    assert (
        none["usage"]["input_tokens"]
        == ask(http, CALL, tools=[], tool_choice="auto", max_output_tokens=4)["usage"]["input_tokens"]
    )


def test_structured_text(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    for options in (
        {"text": {"format": form}},
        {"text": {"format": {"type": "json_object"}}},
        {"guided_json": schema},
    ):
        response = ask(http, max_output_tokens=300, temperature=1, seed=1, **options)
        if response["status"] == "completed":
            assert isinstance(json.loads(text_of(response)), dict)
    assert json.loads(text_of(ask(http, max_output_tokens=300, text={"format": form}))).keys() == {"yes"}


def test_reasoning_is_a_separate_item(thinking: RunningServer) -> None:
    body = {
        **HELLO,
        "reasoning": {"effort": "high", "summary": "auto"},
        "max_output_tokens": 20,
        "temperature": 0,
    }
    with httpx.Client(base_url=thinking.url, timeout=30) as http:
        whole, events = ask(http, body), stream(http, body)
        kinds = [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ]
        assert names(events) == ["created", "in_progress", *kinds, "output_item.done", "incomplete"]
        assert same(events[-1]["response"]) == same(whole)
        [thought] = whole["output"]
        assert (thought["type"], thought["summary"], thought["status"]) == ("reasoning", [], "incomplete")
        assert thought["content"][0]["text"]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 20
        again = ask(http, body, input=[*whole["output"], {"role": "user", "content": "Go on"}], **LOGPROBS)
        assert again["output"][0]["type"] == "reasoning"
        assert ask(http, body, previous_response_id=whole["id"], store=False)["status"] == "incomplete"


def test_an_input_is_optional(http: httpx.Client) -> None:
    found = [{"role": "system", "content": "Say something."}]
    alone, as_item = (
        ask(http, temperature=0, **options)
        for options in ({"input": None, "instructions": "Say something."}, {"input": found})
    )
    assert same(alone) == same(as_item)
    alone_again = ask(http, temperature=0, input=None, previous_response_id=alone["id"])
    assert same(alone_again) == same(ask(http, temperature=0, input=alone["output"]))


def test_input_tokens_are_counted_without_an_answer(http: httpx.Client) -> None:
    counted = http.post(f"{PATH}/input_tokens", json={"input": "Where?", "tools": [WEATHER]}).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == ask(http, input="Where?", tools=[WEATHER])["usage"]["input_tokens"]


def test_a_failing_step_fails_its_response_only(renderer: Renderer) -> None:
    faults = dict.fromkeys((3, 4, 13, 14), BackendError("at 0x7f00"))  # each twice in a row
    with (
        serve(renderer, backend_spec=spec(max_decode_steps=1), faults=faults, is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        server.gate.let(2)
        events = stream(http, once_begun=server.gate.open, max_output_tokens=50)
        assert names(events)[:2] == ["created", "in_progress"]
        failed = events[-1]["response"]
        assert (events[-1]["type"], failed["status"], failed["error"]["code"]) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert "0x7f00" not in json.dumps(events)
        assert http.get(f"{PATH}/{failed['id']}").json() == failed
        background = ask(http, background=True, max_output_tokens=50)
        while (found := http.get(f"{PATH}/{background['id']}").json())["status"] in ("queued", "in_progress"):
            pass
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert ask(http)["status"] == "incomplete"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "narrator", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": 5}]}, "input[0]", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
        "invalid_value",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input", "invalid_value"),
    ({"input": "\ud800"}, "input", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 5000}, "input", "context_length_exceeded"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TIME, TIME]}, "tools", "invalid_value"),
    ({"tools": [TIME] * 129}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TIME]}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "web_search_preview"}, "tools": [TIME]}, "tool_choice.type", "invalid_value"),
    ({"tools": [{**TIME, "parameters": {"const": float("nan")}}]}, "", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}, "strict": True}}},
        "text.format",
        "invalid_value",
    ),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"text": {"verbosity": "endless"}}, "text.verbosity", "invalid_value"),
    ({"reasoning": {"effort": "endless"}}, "reasoning.effort", "invalid_value"),
    ({"truncation": "always"}, "truncation", "invalid_value"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "unsupported_parameter"),
    ({"max_tool_calls": -1}, "max_tool_calls", "invalid_value"),
    ({"include": [5]}, "include[0]", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"background": True, "stream": True}, "stream", "invalid_value"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"model": "gpt-9"}, "model", "model_not_found"),
]


@pytest.mark.parametrize(("change", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
def test_invalid_values_are_refused(
    http: httpx.Client, change: dict[str, Any], param: str, code: str
) -> None:
    response = http.post(
        PATH, content=json.dumps(HELLO | change), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == (404 if code == "model_not_found" else 400), response.text
    error = response.json()["error"]
    assert (error["param"] or "", error["code"]) == (param, code), error
    if param.startswith("tools[0].type"):
        assert change["tools"][0]["type"] in error["message"]


class Lamp(BaseModel):
    place: Literal["shelf", "table"]


def test_the_sdk(sdk: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_output_tokens": 200, "temperature": 1}
    response = sdk.responses.create(
        input="Hello", extra_body={"ignore_eos": True}, **(options | {"max_output_tokens": 8})
    )
    assert response.output_text
    assert sdk.responses.retrieve(response.id) == response
    assert [item.type for item in sdk.responses.input_items.list(response.id)] == ["message"]
    parsed = sdk.responses.parse(input="Where?", text_format=Lamp, **options)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.place in ("shelf", "table")
    with sdk.responses.stream(input="Where?", text_format=Lamp, **options) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert Lamp.model_validate_json(text) == final.output_parsed
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_the_sdk_makes_a_round_trip_with_tools(sdk: openai.OpenAI) -> None:
    tools: Any = [WEATHER | {"strict": True}]
    options: Any = {"model": MODEL, "tools": tools, "max_output_tokens": 400}
    asked = sdk.responses.create(
        input="Weather?", tool_choice="required", parallel_tool_calls=False, temperature=1, **options
    )
    [call] = asked.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more: Any = {
        **options,
        "max_output_tokens": 8,
        "extra_body": {"ignore_eos": True},
        "tool_choice": "none",
        "temperature": 0,
    }
    kept = sdk.responses.create(input=[result], previous_response_id=asked.id, **more)
    sent = sdk.responses.create(
        input=[{"role": "user", "content": "Weather?"}, cast("Any", call), result], **more
    )
    assert kept.output_text == sent.output_text != ""


async def test_the_asynchronous_sdk(running: RunningServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=30
    ) as sdk:
        options: Any = {
            "model": MODEL,
            "input": "Hello",
            "max_output_tokens": 8,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        response = await sdk.responses.create(**options)
        async with sdk.responses.stream(**options) as events:
            snapshots = [
                event.snapshot async for event in events if event.type == "response.output_text.delta"
            ]
        stream = await sdk.responses.create(stream=True, **options)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == snapshots[-1] == response.output_text


@pytest.mark.openai_schema
def test_openais_schema(http: httpx.Client, thinking: RunningServer, document: Any) -> None:  # noqa: F811
    rich = {"metadata": {"a": "b"}, "instructions": "Be brief.", **LOGPROBS}
    bodies = [
        HELLO | rich,
        CALL,
        HELLO | {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ]
    for body in bodies:
        check(document, "Response", ask(http, body))
    with httpx.Client(base_url=thinking.url, timeout=30) as reasoning:
        events = stream(reasoning, HELLO | {"reasoning": {"effort": "low"}})
    events += stream(http, bodies[0]) + stream(http, CALL)
    for event in {event["type"]: event for event in events}.values():
        check(document, EVENT_SCHEMAS[event["type"]], event)
    response = ask(http, previous_response_id=ask(http, CALL)["id"], input=[{"role": "user", "content": "x"}])
    check(document, "ResponseItemList", http.get(f"{PATH}/{response['id']}/input_items").json())
    check(document, "Response", ask(http, background=True))
    check(document, "ErrorResponse", http.get(f"{PATH}/resp_x").json())


EVENT_SCHEMAS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
}


def test_an_empty_text_is_an_input(http: httpx.Client) -> None:
    whole = ask(http, input="", max_output_tokens=1)
    (item,) = http.get(f"{PATH}/{whole['id']}/input_items").json()["data"]
    assert (item["role"], item["content"][0]["text"]) == ("user", "")

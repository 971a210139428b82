"""`/v1/chat/completions`, in all that OpenAI's own clients ask of it."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.conformance.api import HELLO, Api, text_of

LEVEL = {
    "type": "object",
    "properties": {"level": {"enum": ["low", "high"]}},
    "required": ["level"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "set_level", "description": "Set the level.", "parameters": LEVEL, "strict": True},
}


def test_answer(api: Api) -> None:
    """chat: an answer's form"""
    answer = api.chat()
    assert answer["object"] == "chat.completion"
    assert answer["id"]
    assert isinstance(answer["created"], int)
    assert answer["model"]
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] in ("stop", "length")
    assert {"role", "content", "refusal"} <= set(choice["message"])
    assert choice["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_stream(api: Api) -> None:
    """chat: streaming says what the whole answer says"""
    chunks = api.stream_chat()
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    finished = [
        choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
    ]
    assert len(finished) == 1
    assert text_of(chunks) == (api.chat()["choices"][0]["message"]["content"] or "")


def test_stream_usage(api: Api) -> None:
    """chat: stream_options.include_usage"""
    chunks = api.stream_chat(stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk.get("usage", "missing") is None for chunk in chunks[:-1])


def test_max_tokens(api: Api) -> None:
    """chat: max_tokens and max_completion_tokens"""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = api.post("/v1/chat/completions", messages=HELLO, **{name: 3})
        assert answer["usage"]["completion_tokens"] <= 3
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_greedy(api: Api) -> None:
    """chat: temperature 0 answers alike twice"""
    assert api.chat()["choices"][0]["message"] == api.chat()["choices"][0]["message"]


def test_seed(api: Api) -> None:
    """chat: seed"""
    answers = [
        api.chat(temperature=1, seed=7, max_tokens=16)["choices"][0]["message"]["content"] for _ in range(2)
    ]
    assert answers[0] == answers[1]


def test_n(api: Api) -> None:
    """chat: n"""
    answer = api.chat(n=3, temperature=1, seed=1)
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2]
    chunks = api.stream_chat(n=2, temperature=1)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}


def test_stop(api: Api) -> None:
    """chat: stop"""
    text = api.chat(max_tokens=12)["choices"][0]["message"]["content"]
    assert text, "an empty answer says nothing of stop strings"
    stop = text[len(text) // 2 :][:3]
    for stops in (stop, [stop, "\0never\0"]):
        choice = api.chat(max_tokens=12, stop=stops)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(stop)]


def test_logprobs(api: Api) -> None:
    """chat: logprobs and top_logprobs"""
    content = api.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert content
    for token in content:
        assert token["logprob"] <= 0
        assert bytes(token["bytes"]) is not None
        assert len(token["top_logprobs"]) == 3
        assert token["logprob"] <= max(other["logprob"] for other in token["top_logprobs"]) + 1e-6


def test_logit_bias(api: Api) -> None:
    """chat: logit_bias"""
    plain, biased = (api.chat(max_tokens=4, **options) for options in ({}, {"logit_bias": {"40": 100}}))
    assert plain["choices"][0]["message"] != biased["choices"][0]["message"]


def test_penalties(api: Api) -> None:
    """chat: presence_penalty, frequency_penalty and top_p"""
    assert api.chat(presence_penalty=1.5, frequency_penalty=-0.5, top_p=0.5)["choices"]


def test_turns(api: Api) -> None:
    """chat: system and several turns"""
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
    ]
    assert (
        api.chat(messages=turns)["usage"]["prompt_tokens"]
        > api.chat(messages=turns[1:2])["usage"]["prompt_tokens"]
    )


def test_developer(api: Api) -> None:
    """chat: the developer role"""
    assert api.chat(messages=[{"role": "developer", "content": "Be brief."}, *HELLO])["choices"]


def test_inert(api: Api) -> None:
    """chat: user, metadata, store and service_tier are taken"""
    assert api.chat(user="me", metadata={"a": "b"}, store=False, service_tier="auto")["choices"]


def test_json_object(api: Api) -> None:
    """chat: response_format json_object"""
    choice = api.chat(
        messages=[{"role": "user", "content": "Answer in JSON: {}"}],
        response_format={"type": "json_object"},
        max_tokens=300,
    )["choices"][0]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


def test_json_schema(api: Api) -> None:
    """chat: response_format json_schema"""
    form = {"type": "json_schema", "json_schema": {"name": "level", "strict": True, "schema": LEVEL}}
    choice = api.chat(response_format=form, max_tokens=300)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["level"] in ("low", "high")


def test_tools_required(api: Api) -> None:
    """chat: tools with tool_choice required"""
    [choice] = api.chat(tools=[TOOL], tool_choice="required", max_tokens=300)["choices"]
    called(choice["message"]["tool_calls"])


def test_tools_named(api: Api) -> None:
    """chat: tools with a named tool_choice"""
    named = {"type": "function", "function": {"name": "set_level"}}
    [choice] = api.chat(tools=[TOOL], tool_choice=named, max_tokens=300)["choices"]
    called(choice["message"]["tool_calls"])


def test_tools_streamed(api: Api) -> None:
    """chat: streamed tool calls put together are the call"""
    calls: dict[int, Any] = {}
    for chunk in api.stream_chat(tools=[TOOL], tool_choice="required", max_tokens=300):
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(
                    piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = piece.get("id") or call.get("id")
                for key, text in piece.get("function", {}).items():
                    call["function"][key] += text or ""
    called([calls[index] for index in sorted(calls)])


def called(calls: list[Any]) -> None:
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert (call["type"], call["function"]["name"]) == ("function", "set_level")
        assert json.loads(call["function"]["arguments"])["level"] in ("low", "high")


def test_tool_results(api: Api) -> None:
    """chat: results of tools as messages"""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "set_level", "arguments": '{"level": "low"}'},
    }
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    assert api.chat(messages=turns, tools=[TOOL], tool_choice="none")["choices"]


def test_many_at_once(api: Api) -> None:
    """chat: sixteen requests at once are all answered"""
    with ThreadPoolExecutor(16) as executor:
        answers = list(
            executor.map(
                lambda number: api.chat(messages=[{"role": "user", "content": f"Hello {number}"}]), range(16)
            )
        )
    assert len({answer["id"] for answer in answers}) == 16


def test_leaving(api: Api) -> None:
    """chat: a stream that is left does not disturb the next request"""
    with api.streaming("/v1/chat/completions", messages=HELLO, max_tokens=200) as response:
        next(response.iter_lines())
    assert api.chat()["choices"]

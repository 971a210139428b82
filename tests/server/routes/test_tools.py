"""Tools over HTTP and the SDK: required calls in every format, streamed or not, and conversations."""

import json
from collections.abc import Iterator
from typing import Any, Literal, cast

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from server.generation.turn import ChatFormat, template_warnings
from server.options.models import DEMO_MODEL
from server.options.settings import ToolParserName
from server.parsers.tool_format import TOOL_FORMATS, tool_format_of
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.events import data
from tests.server.scripted import scripted_by
from tests.server.serving import MODEL, RunningServer, serve, settings

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", 'St. "X"', "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Forecast", "parameters": SCHEMA},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
HELLO: Any = [{"role": "user", "content": "How is the weather?"}]
BODY: dict[str, Any] = {
    "messages": HELLO,
    "tools": [WEATHER, TIME],
    "tool_choice": "required",
    "max_tokens": 400,
    "temperature": 1.5,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}

# A template that knows tools and reasoning, and shows all that it was given.
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{{ reasoning_effort }}{{ enable_thinking "
    "}}<tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'user' "
    "}}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ "
    "call.function.arguments.city }}{% endfor %}"
    "{{ message.reasoning_content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% "
    "endif %}{# </think> #}"
)


REPLY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TYPED: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": REPLY}}


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningServer]:
    """A server whose model reasons and knows tools."""
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE
    own = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    with serve(own) as server:
        yield server
    own.close()


def checked(message: dict[str, Any]) -> list[str]:
    """Return the names of a message's calls, whose arguments must be right."""
    for call in message["tool_calls"]:
        assert set(call) == {"id", "type", "function"}
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert arguments == {}
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    return [call["function"]["name"] for call in message["tool_calls"]]


def ask(http: httpx.Client, **options: Any) -> Any:
    response = http.post(CHAT, json=BODY | options)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_required_calls_are_made_in_every_format(renderer: Renderer, name: str) -> None:
    with (
        serve(renderer, settings(tool_call_parser=ToolParserName(name))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        seen = set()
        # In the pythonic format, the untrained model rarely calls get_time.
        for seed in range(24 if name == "pythonic" else 6):
            choice = ask(http, seed=seed, parallel_tool_calls=False)
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            [called] = checked(choice["message"])
            seen.add(called)
            choice = ask(http, seed=seed, tool_choice=NAMED, tools=[WEATHER, TIME])
            assert choice["finish_reason"] == "stop"
            assert checked(choice["message"]) == ["get_weather"]
        assert seen == {"get_weather", "get_time"}
        several = (ask(http, seed=seed) for seed in range(20))
        named = (checked(choice["message"]) for choice in several if choice["finish_reason"] != "length")
        assert any(len(names) > 1 for names in named)


def test_required_calls_are_made_in_harmony_s_channels() -> None:
    """Reasoning may come first. As with gpt-oss, the token that ends it does not end the answer."""
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.eos_token = "<|user|>"
    renderer = Renderer(Tokenizer(inner, {"eos_token_id": inner.eos_token_id}))
    with (
        serve(renderer, settings(tool_call_parser=ToolParserName.HARMONY)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        choices = [ask(http, seed=seed, thinking_token_budget=5) for seed in range(12)]
        named = ask(http, seed=1, thinking_token_budget=5, tool_choice=NAMED)
    renderer.close()
    assert checked(named["message"]) == ["get_weather"]
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    called = [checked(choice["message"]) for choice in choices]
    assert all(len(names) == 1 for names in called)
    assert {name for [name] in called} == {"get_weather", "get_time"}
    assert any(choice["message"].get("reasoning_content") for choice in choices)


def test_harmony_s_channels_become_reasoning_and_a_call(renderer: Renderer) -> None:
    reply = (  # without <|end|>, which ends an answer of the demo model
        "<|channel|>analysis<|message|>Oslo, then.<|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}'
    )
    maker = scripted_by(renderer, lambda _: reply)
    with (
        serve(renderer, settings(tool_call_parser=ToolParserName.HARMONY), make_backend=maker) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        choice = ask(http, tool_choice="auto", temperature=0)
        with http.stream("POST", CHAT, json=BODY | {"stream": True, "temperature": 0}) as response:
            deltas = [chunk["choices"][0]["delta"] for chunk in data(response)]
    assert choice["finish_reason"] == "tool_calls", str(choice["message"])
    assert choice["message"]["reasoning"] == "Oslo, then."
    assert not choice["message"]["content"]
    assert checked(choice["message"]) == ["get_weather"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Oslo, then."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == '{"city": "Oslo", "days": 2}'


def test_kimi_s_ids_number_all_calls_of_a_conversation(renderer: Renderer) -> None:
    earlier = {
        "id": "functions.get_time:0",
        "type": "function",
        "function": {"name": "get_time", "arguments": "{}"},
    }
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": earlier["id"], "content": "noon"},
    ]
    with (
        serve(renderer, settings(tool_call_parser=ToolParserName.KIMI_K2)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        choice = ask(http, messages=turns, tool_choice=NAMED)
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.get_weather:1"]


def test_streamed_calls_equal_the_unstreamed_answer(http: httpx.Client) -> None:
    whole = ask(http, seed=4, parallel_tool_calls=False)
    with http.stream(
        "POST", CHAT, json=BODY | {"seed": 4, "parallel_tool_calls": False, "stream": True}
    ) as response:
        choices = [chunk["choices"][0] for chunk in data(response)]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
    [first], *rest = [choice["delta"]["tool_calls"] for choice in choices[1:-1]]
    assert (first["index"], first["type"], first["function"]["arguments"]) == (0, "function", "")
    assert all(set(delta) == {"index", "function"} for [delta] in rest)
    [call] = whole["message"]["tool_calls"]
    assert first["function"]["name"] == call["function"]["name"]
    assert "".join(delta["function"]["arguments"] for [delta] in rest) == call["function"]["arguments"]


class GetWeather(BaseModel):
    city: Literal["Oslo", "Bergen"]
    days: int = Field(ge=1, le=9)


def test_the_sdk_parses_arguments_into_models(sdk: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    answer = sdk.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        temperature=1,
        seed=1,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    again = sdk.chat.completions.create(
        model=MODEL,
        messages=[
            *HELLO,
            cast("Any", answer.choices[0].message),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ],
        tools=[tool],
        max_tokens=4,
        extra_body={"ignore_eos": True},
    )
    assert again.choices[0].message.content


def test_the_sdk_streams_calls(sdk: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    with sdk.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=1,
        seed=2,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_the_beginning_of_a_call_is_no_content(http: httpx.Client, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    answered = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (answered["message"]["content"], answered["finish_reason"]) == ("", "length")
    assert "tool_calls" not in answered["message"]


def test_none_leaves_tools_out(http: httpx.Client) -> None:
    without = http.post(CHAT, json={"messages": HELLO, "max_tokens": 4, "seed": 1, "ignore_eos": True}).json()
    none = http.post(
        CHAT,
        json={
            **BODY,
            "tool_choice": "none",
            "max_tokens": 4,
            "seed": 1,
            "ignore_eos": True,
            "temperature": 0,
        },
    ).json()
    assert none["usage"] == without["usage"]
    assert "tool_calls" not in none["choices"][0]["message"]


def test_reasoning_is_separate_and_the_grammar_starts_after_it(thinking: RunningServer) -> None:
    regex = {"guided_regex": "[0-9]{3}", "tools": None, "tool_choice": None}
    with httpx.Client(base_url=thinking.url, timeout=30) as http:
        choice = ask(
            http, **regex, stop=["</think>"], chat_template_kwargs={"enable_thinking": True}, max_tokens=60
        )
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] != ""
        choice = ask(http, **regex)  # without the tag at the prompt's end, reasoning is the model's choice
        assert choice["message"]["content"].isdecimal() or "reasoning" in choice["message"]


def test_tokens_of_reasoning_are_counted(thinking: RunningServer) -> None:
    options: dict[str, Any] = {
        "tools": None,
        "tool_choice": None,
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 30,
        "n": 2,
    }
    with httpx.Client(base_url=thinking.url, timeout=30) as http:
        whole = http.post(CHAT, json=BODY | options | {"seed": 1, "ignore_eos": True}).json()
        streamed = (
            BODY
            | options
            | {"seed": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        )
        with http.stream("POST", CHAT, json=streamed) as response:
            *_, last = data(response)
        quiet = http.post(
            CHAT,
            json=BODY
            | options
            | {"chat_template_kwargs": None, "guided_choice": ["yes"], "max_tokens": 20, "seed": 1},
        ).json()
    assert not any(choice["message"]["content"] for choice in whole["choices"])
    assert (
        whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        == whole["usage"]["completion_tokens"]
        == 60
    )
    assert last["usage"] == whole["usage"]
    for choice in quiet["choices"]:  # whether to reason is the model's choice here
        assert choice["message"]["content"] == "yes" or "reasoning" in choice["message"]
    assert (
        quiet["usage"]["completion_tokens_details"]["reasoning_tokens"] < quiet["usage"]["completion_tokens"]
    )


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called(http: httpx.Client) -> None:
    for seed in range(6):
        choice = ask(http, seed=seed, parallel_tool_calls=False, tool_choice=allowed("required", "get_time"))
        assert checked(choice["message"]) == ["get_time"]
    alone = http.post(CHAT, json=BODY | {"tools": [WEATHER], "tool_choice": "auto", "seed": 1}).json()
    among = http.post(CHAT, json=BODY | {"tool_choice": allowed("auto", "get_weather"), "seed": 1}).json()
    assert (among["choices"], among["usage"]) == (alone["choices"], alone["usage"])


def test_a_template_gets_tools_calls_and_variables(thinking: RunningServer) -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    with httpx.Client(base_url=thinking.url, timeout=30) as http:
        plain = http.post(CHAT, json=BODY | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        longer = http.post(CHAT, json=BODY | {"max_tokens": 1, "messages": messages}).json()["usage"][
            "prompt_tokens"
        ]
        effort = http.post(CHAT, json=BODY | {"max_tokens": 1, "reasoning_effort": "high"}).json()["usage"][
            "prompt_tokens"
        ]
        quiet = http.post(CHAT, json=BODY | {"max_tokens": 1, "reasoning_effort": "none"}).json()["usage"][
            "prompt_tokens"
        ]
    assert plain < effort
    assert plain + 10 < longer
    assert plain < quiet  # by the word False for `enable_thinking`


def test_a_template_without_tools_gets_them_as_text() -> None:
    chat_format = ChatFormat.of("{{ messages }}", settings())
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    system, user, assistant, result = chat_format.with_tools(
        turns, [{"type": "function", "function": {"name": "f"}}]
    )
    assert system["content"].startswith("Be brief.\n\nYou may call")
    assert '{"name": "f"}' in system["content"]
    assert user == turns[1]
    assert assistant == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "done"}
    assert chat_format.with_tools(turns[1:2], [{"function": {}}])[0]["role"] == "system"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' ~ name ~ '[ARGS]' }}", "mistral_v11"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>x```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>", "deepseek_v31"),
        ("{{ '\"parameters\": ' }}", "llama3_json"),
        ("<tool_call>\\n<function=f>\\n<parameter=a>", "qwen3_coder"),
        ("<seed:tool_call>\\n<function=f>\\n<parameter=a>", "seed_oss"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<start_function_call>call:", "function_gemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<|tool_call|>", "granite"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini"),
        ("functools[", "phi4_mini"),
        ("<function_calls>", "olmo3"),
        ("[func_name1(param1=value1)]", "pythonic"),
        ("<|start|>assistant<|channel|>final", "harmony"),
        ("```json", None),
        ("", None),
    ],
)
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    assert tool_format_of(template) is (None if name is None else TOOL_FORMATS[name])


def test_warnings_name_templates_that_cannot_be_followed() -> None:
    assert template_warnings("{{ tools }}<tool_call>", settings()) == []
    assert template_warnings("{{ messages }}", settings()) == []
    [unknown] = template_warnings("{{ tools }}", settings())
    assert "--tool-call-parser" in unknown
    assert template_warnings("{{ tools }}", settings(tool_call_parser=ToolParserName.JSON)) == []
    [none] = template_warnings(None, settings())
    assert "--chat-template" in none
    tokenizer = Tokenizer.load(str(DEMO_MODEL), "{{ tools }}")
    with serve(Renderer(tokenizer), settings()) as server:
        [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["warnings"] == [unknown]


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_with_a_typed_answer_the_model_calls_or_answers_by_the_schema(
    renderer: Renderer, name: str, strict: bool | None
) -> None:
    """Random tokens under the mask: over some seeds, both kinds of answers occur."""
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    kinds = set()
    with (
        serve(renderer, settings(tool_call_parser=ToolParserName(name))) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        for seed in range(8):
            body = BODY | {"tools": [tool], "tool_choice": "auto", "response_format": TYPED, "seed": seed}
            message = http.post(CHAT, json=body).json()["choices"][0]["message"]
            if "tool_calls" in message:
                assert set(checked(message)) == {"get_weather"}
                assert message["content"] is None
            else:
                jsonschema.validate(json.loads(message["content"]), REPLY)
            kinds.add("tool_calls" in message)
            chunks = data(http.post(CHAT, json=body | {"stream": True}))
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
            streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            whole = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
            assert "".join(call.get("arguments", "") for call in streamed) == whole
    assert kinds == {True, False}

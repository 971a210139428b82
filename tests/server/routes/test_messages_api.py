"""Anthropic's own SDK, which validates answers strictly, and the real server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel
from transformers import AutoTokenizer

from backends.interface import BackendError, PrefixSpec
from scheduler.config import SchedulerConfig
from server.options.models import DEMO_MODEL
from server.options.settings import RateLimit, ToolParserName
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.events import blocks
from tests.server.routes.test_tools import SCHEMA, TEMPLATE
from tests.server.scripted import scripted_by
from tests.server.serving import MODEL, RunningServer, serve, settings, spec

HELLO: Any = [{"role": "user", "content": "Where does Anna keep the lamp?"}]
LONG: dict[str, Any] = {"ignore_eos": True}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Forecast", "input_schema": SCHEMA}
TIME: dict[str, Any] = {"name": "get_time", "input_schema": {"type": "object", "additionalProperties": False}}
PREFIXES = PrefixSpec(num_blocks=64, block_tokens=8, block_bytes=64)


def client(server: RunningServer, key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key=key, max_retries=0, timeout=30, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def claude(running: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client(running) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def thinker() -> Iterator[Renderer]:
    """A model whose template knows tools, reasoning and efforts."""
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE
    renderer = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    yield renderer
    renderer.close()


def request(**options: Any) -> dict[str, Any]:
    extra = LONG | options.pop("extra_body", {})
    if "temperature" in options:
        extra["temperature"] = options.pop("temperature")  # the SDK has no name for it any more
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, "extra_body": extra} | options


def ask(sdk: anthropic.Anthropic, **options: Any) -> Message:
    answer: Message = sdk.messages.create(**request(**options))
    return answer


def events_of(sdk: anthropic.Anthropic, **options: Any) -> list[RawMessageStreamEvent]:
    return list(sdk.messages.create(**request(**options), stream=True))


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def comparable(message: Message) -> dict[str, Any]:
    """Return what two answers to one request have in common: not the ids."""
    plain: dict[str, Any] = message.to_dict(mode="json", exclude_none=True)
    plain.pop("id")
    for block in plain["content"]:
        block.pop("id", None)
    plain["usage"].pop("cache", None)
    return plain


def test_a_message(claude: anthropic.Anthropic) -> None:
    answer = ask(claude)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert text_of(answer)
    assert answer.usage.output_tokens == 8
    assert answer.usage.input_tokens > 8
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)


def test_a_streamed_message_equals_the_whole_one(claude: anthropic.Anthropic) -> None:
    options: Any = {"max_tokens": 20, "extra_body": {"seed": 3}}
    with claude.messages.stream(**request(**options)) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    whole = ask(claude, **options)
    assert comparable(streamed) == comparable(whole)
    assert text == text_of(whole)


def test_the_order_of_events(claude: anthropic.Anthropic, running: RunningServer) -> None:
    kinds = [event.type for event in events_of(claude)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    body = {"model": MODEL, "max_tokens": 2, "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/messages", json=body) as response:
        names = [block.splitlines()[0] for block in blocks(response)]
    assert names[:2] == ["event: message_start", "event: ping"]


def test_a_silent_stream_has_pings(renderer: Renderer) -> None:
    ping = 'event: ping\ndata: {"type":"ping"}'
    body = {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "lamp " * 600}],
        "stream": True,
    }
    with (
        serve(renderer, settings(keepalive_interval=0.01), spec(num_slots=1), is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        server.gate.let(2)
        with http.stream("POST", "/v1/messages", json=body) as response:
            events = blocks(response)
            begun = [next(events) for _ in range(4)]
            server.gate.open()
            rest = list(events)
    assert begun[1:] == [ping] * 3
    assert rest[-1].startswith("event: message_stop")


def test_all_that_changes_nothing_is_accepted(claude: anthropic.Anthropic) -> None:
    cached: Any = {"type": "ephemeral", "ttl": "1h"}
    plain = ask(claude, temperature=0, system="Be brief.")
    same = ask(
        claude,
        temperature=0,
        system=[{"type": "text", "text": "Be brief.", "cache_control": cached}],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": HELLO[0]["content"], "cache_control": cached}],
                "clear_at": "never",
            }
        ],
        metadata={"user_id": "anna"},
        service_tier="auto",
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        extra_headers={"anthropic-beta": "context-management-2025-06-27,none-of-ours"},
        extra_query={"beta": "true"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}],
            "container": None,
            "speed": "fast",
        },
    )
    assert comparable(same) == comparable(plain)


def test_what_is_skipped_is_reported(claude: anthropic.Anthropic) -> None:
    skipped: Any = {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, WEATHER],
        "messages": [{"role": "user", "content": [{"type": "new"}]}, *HELLO],
        "output_config": {"effort": "high"},
        "extra_body": {"context_management": {}},
    }
    answer = claude.messages.with_raw_response.create(**request(**skipped))
    names = set(answer.headers["x-ignored-parameters"].split(", "))
    expected = {"context_management", "tools.web_search_20250305", "messages.new", "output_config.effort"}
    assert names == expected


def test_the_user_is_the_tenant_where_there_are_no_keys(renderer: Renderer) -> None:
    with serve(renderer) as server, client(server) as sdk:
        ask(sdk, metadata={"user_id": "anna"})
        assert server.observed.adds[-1].tenant == "anna"


def test_tokens_are_counted_as_usage_counts_them(claude: anthropic.Anthropic) -> None:
    for options in (
        {},
        {"system": "Be brief.", "tools": [WEATHER, TIME]},
        {"messages": [*HELLO, {"role": "assistant", "content": "In the"}]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
    ):
        asked: Any = {"model": MODEL, "messages": HELLO} | options
        count = claude.messages.count_tokens(**asked)
        assert count.input_tokens == ask(claude, **options).usage.input_tokens


def test_restored_tokens_are_reported(renderer: Renderer) -> None:
    with serve(renderer, backend_spec=spec(prefixes=PREFIXES)) as server, client(server) as sdk:
        first, second = ask(sdk).usage, ask(sdk).usage
        with sdk.messages.stream(**request()) as stream:
            streamed = stream.get_final_message().usage
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens
    assert streamed.cache_read_input_tokens == second.cache_read_input_tokens
    assert streamed.input_tokens == second.input_tokens


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    options: Any = {"temperature": 0, "max_tokens": 24}
    text = text_of(ask(claude, **options))
    stop = text[len(text) // 2 :][:3]
    stopped = ask(claude, **options, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text[: text.index(stop)]
    *_, end, _ = events_of(claude, **options, stop_sequences=[stop])
    assert end.type == "message_delta"
    assert (end.delta.stop_reason, end.delta.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_goes_on_where_the_last_turn_ends(renderer: Renderer) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return " the attic."

    with serve(renderer, make_backend=scripted_by(renderer, reply)) as server, client(server) as sdk:
        messages = [*HELLO, {"role": "assistant", "content": "It is in"}]
        answer = sdk.messages.create(model=MODEL, max_tokens=30, messages=messages)
    assert prompts[0].endswith("It is in")
    assert text_of(answer) == " the attic."
    assert answer.stop_reason == "end_turn"


def test_a_limit_beyond_the_context_shrinks_to_it(renderer: Renderer) -> None:
    with serve(renderer, backend_spec=spec(max_model_len=64)) as server, client(server) as sdk:
        answer = ask(sdk, max_tokens=32000)
        assert answer.stop_reason == "model_context_window_exceeded"
        assert answer.usage.input_tokens + answer.usage.output_tokens == 64
        exact = ask(sdk, max_tokens=answer.usage.output_tokens)
        assert exact.stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
            ask(sdk, messages=[{"role": "user", "content": "lamp " * 100}])
        assert caught.value.type == "invalid_request_error"


def checked(message: Message) -> list[str]:
    """Return the names of a message's calls, whose arguments must be right."""
    calls = [block for block in message.content if block.type == "tool_use"]
    for call in calls:
        jsonschema.validate(call.input, SCHEMA if call.name == "get_weather" else {"maxProperties": 0})
    assert len({call.id for call in calls}) == len(calls)
    return [call.name for call in calls]


def test_required_calls(claude: anthropic.Anthropic) -> None:
    options: Any = {"tools": [WEATHER, TIME], "max_tokens": 400, "temperature": 1.0}
    some, one = {"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}
    numbers, names = set(), set()
    for seed in range(5):
        body = {"seed": seed, "ignore_eos": False}
        several = ask(claude, **options, tool_choice=some, extra_body=body)
        if several.stop_reason == "tool_use":
            numbers.add(len(checked(several)))
        single = ask(claude, **options, tool_choice=one, extra_body=body)
        assert single.stop_reason == "tool_use"
        [name] = checked(single)
        names.add(name)
        named = ask(claude, **options, tool_choice={"type": "tool", "name": "get_weather"}, extra_body=body)
        assert checked(named) == ["get_weather"]
        assert named.stop_reason == "tool_use"
    assert max(numbers) > 1
    assert names == {"get_weather", "get_time"}


def test_streamed_calls_equal_whole_ones(claude: anthropic.Anthropic) -> None:
    options: Any = {
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "any"},
        "max_tokens": 400,
        "extra_body": {"seed": 4, "ignore_eos": False},
    }
    with claude.messages.stream(**request(**options)) as stream:
        streamed = stream.get_final_message()
    assert comparable(streamed) == comparable(ask(claude, **options))
    assert checked(streamed)


def test_an_unfinished_call_has_its_text(claude: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    answers = [
        ask(claude, tools=[WEATHER], tool_choice=choice, max_tokens=limit, extra_body={"seed": 1})
        for limit in range(8, 40)
    ]
    calls = [block for answer in answers for block in answer.content if block.type == "tool_use"]
    cut = [call.input for call in calls if "INVALID_JSON" in call.input]
    assert cut
    assert all(answer.stop_reason == "max_tokens" for answer in answers if answer.content == [])


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_thinking(thinker: Renderer, thinking: Any) -> None:
    backend = scripted_by(thinker, lambda _: "Anna has it.</think>The attic.")
    with serve(thinker, make_backend=backend) as server, client(server) as sdk:
        with sdk.messages.stream(model=MODEL, max_tokens=99, messages=HELLO, thinking=thinking) as stream:
            streamed = stream.get_final_message()
        answer = sdk.messages.create(model=MODEL, max_tokens=99, messages=HELLO, thinking=thinking)
    thought, _text = answer.content
    assert thought.type == "thinking"
    assert (thought.thinking, thought.signature) == ("Anna has it.", "unsigned")
    assert text_of(answer) == "The attic."
    assert comparable(streamed) == comparable(answer)
    details = answer.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < answer.usage.output_tokens


def test_thinking_that_is_not_shown_returns_to_the_model(thinker: Renderer) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "Anna has it.</think>The attic."

    hidden: Any = {"type": "adaptive", "display": "omitted"}
    options: Any = {"model": MODEL, "max_tokens": 99, "thinking": hidden}
    with serve(thinker, make_backend=scripted_by(thinker, reply)) as server, client(server) as sdk:
        with sdk.messages.stream(**options, messages=HELLO) as stream:
            answer = stream.get_final_message()
        whole = sdk.messages.create(**options, messages=HELLO)
        more: Any = [*HELLO, {"role": "assistant", "content": answer.content}, HELLO[0]]
        sdk.messages.create(**options, messages=more)
    assert comparable(answer) == comparable(whole)
    thought = answer.content[0]
    assert thought.type == "thinking"
    assert thought.thinking == ""
    assert "Anna has it." not in thought.signature
    assert "Anna has it." in prompts[-1]


def test_thinking_can_be_switched(thinker: Renderer) -> None:
    with serve(thinker) as server, client(server) as sdk:

        def count(**options: Any) -> int:
            count = sdk.messages.count_tokens(
                **{"model": MODEL, "messages": HELLO, "tools": [WEATHER]} | options
            )
            return count.input_tokens

        enabled, disabled = count(thinking={"type": "adaptive"}), count(thinking={"type": "disabled"})
        assert enabled > disabled
        assert count(output_config={"effort": "high"}) > count()


def test_a_turn_with_a_tool(renderer: Renderer) -> None:
    """The model calls, the client answers, and the model sees both."""
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "rain in Oslo" in prompt:
            return "It rains."
        return (
            'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        )

    own = settings(tool_call_parser=ToolParserName.HERMES)
    with serve(renderer, own, make_backend=scripted_by(renderer, reply)) as server, client(server) as sdk:
        options: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER]}
        with sdk.messages.stream(**options, messages=HELLO) as stream:
            call = stream.get_final_message()
        result: Any = {
            "type": "tool_result",
            "tool_use_id": call.content[-1].to_dict()["id"],
            "content": [{"type": "text", "text": "rain in Oslo"}],
        }
        turns: Any = [
            *HELLO,
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ]
        answer = sdk.messages.create(**options, messages=turns)
    assert [block.type for block in call.content] == ["text", "tool_use"]
    assert call.stop_reason == "tool_use"
    assert call.content[1].to_dict()["input"] == {"city": "Oslo"}
    assert (text_of(answer), answer.stop_reason) == ("It rains.", "end_turn")
    assert prompts[1].count("get_weather") == 2  # among the tools, and the call


def test_models_are_listed(claude: anthropic.Anthropic) -> None:
    [model] = claude.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert claude.models.retrieve(MODEL) == model


def test_tools_that_only_anthropic_runs_are_skipped(claude: anthropic.Anthropic) -> None:
    server_tools: Any = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    deferred = TIME | {"defer_loading": True}

    def count(*tools: Any, **options: Any) -> int:
        asked: Any = {"model": MODEL, "messages": HELLO, "tools": tools} | options
        return claude.messages.count_tokens(**asked).input_tokens

    assert count(WEATHER, *server_tools, deferred) == count(WEATHER)
    with pytest.raises(anthropic.BadRequestError, match="none that this server can offer"):
        count(*server_tools, tool_choice={"type": "any"})
    # A tool is offered once a search has found it. Where this server does not run the search, it is at once.
    search: Any = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert count(WEATHER, search, deferred) == count(WEATHER, TIME)
    call = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {"query": "time"}}
    found = {"type": "tool_reference", "tool_name": "get_time"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [found]}]},
    ]
    assert count(WEATHER, deferred, messages=turns) == count(WEATHER, TIME, messages=turns)


class Level(BaseModel):
    level: bool


def test_an_answer_of_a_schema(claude: anthropic.Anthropic) -> None:
    parsed = claude.messages.parse(
        model=MODEL, max_tokens=200, messages=HELLO, output_format=Level, extra_body={"seed": 1}
    )
    assert isinstance(parsed.parsed_output, Level)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    older = ask(
        claude,
        max_tokens=200,
        extra_body={"output_format": {"type": "json_schema", "schema": schema}, "ignore_eos": False},
    )
    assert json.loads(text_of(older))["a"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "document of source 'url'",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "'type'"),
        ({"tools": [WEATHER, WEATHER]}, "different name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "not among 'tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "needs a 'name'"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "empty"),
        ({"thinking": {}}, "thinking.type"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ],
)
def test_wrong_requests(claude: anthropic.Anthropic, options: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        ask(claude, **options)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_other_errors_have_anthropics_form(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("one",), max_body_size=4000)) as server:
        with client(server, "one") as sdk:
            assert ask(sdk).content
            with pytest.raises(anthropic.NotFoundError) as unknown:
                ask(sdk, model="other")
            assert unknown.value.type == "not_found_error"
            with pytest.raises(anthropic.ContentTooLargeError) as large:
                ask(sdk, messages=[{"role": "user", "content": "lamp " * 1000}])
            assert str(large.value.type) == "request_too_large"
        with client(server, "two") as sdk, pytest.raises(anthropic.AuthenticationError) as wrong:
            ask(sdk)
        assert wrong.value.type == "authentication_error"
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="one", max_retries=0)
        with bearer:
            assert bearer.messages.create(model=MODEL, max_tokens=2, messages=HELLO).content
        missing = httpx.get(f"{server.url}/v1/messages/none", headers={"x-api-key": "one"})
    assert missing.json()["error"]["type"] == "not_found_error"


def test_a_keys_limit_and_a_full_server(renderer: Renderer) -> None:
    with (
        serve(renderer, settings(rate_limit=RateLimit(requests=1))) as server,
        client(server) as sdk,
    ):
        ask(sdk)
        with pytest.raises(anthropic.RateLimitError) as limited:
            ask(sdk)
    assert limited.value.type == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) > 0
    config = SchedulerConfig(max_num_waiting=1)
    with (
        serve(renderer, backend_spec=spec(num_slots=1), config=config, is_open=False) as server,
        client(server) as sdk,
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(ask, sdk)
        assert server.gate.arrived.acquire(timeout=30)
        second = pool.submit(ask, sdk)
        server.observed.wait_until(lambda: server.observed.num_reserved == 2)
        with pytest.raises(anthropic.OverloadedError) as full:
            ask(sdk)
        server.gate.open()
        assert first.result().content
        assert second.result().content
    assert full.value.type == "overloaded_error"
    assert full.value.response.headers["retry-after"] == "1"


def test_an_error_inside_a_stream_is_raised_by_the_sdk(renderer: Renderer) -> None:
    fault = dict.fromkeys((3, 4), BackendError("a step failed at address 0x7f00"))
    with (
        serve(renderer, backend_spec=spec(max_decode_steps=1), faults=fault) as server,
        client(server) as sdk,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        events_of(sdk)
    assert caught.value.type == "api_error"
    assert "0x7f00" not in str(caught.value.body)


def test_counting_tokens_is_a_request_in_its_keys_limits(renderer: Renderer) -> None:
    limited = settings(rate_limit=RateLimit(requests=1))
    with serve(renderer, limited) as running, client(running) as sdk:
        counted = sdk.messages.count_tokens(model=MODEL, messages=HELLO)
        assert counted.input_tokens > 0
        with pytest.raises(anthropic.RateLimitError):
            sdk.messages.count_tokens(model=MODEL, messages=HELLO)


def test_a_deep_input_of_a_call_is_no_server_error(running: RunningServer) -> None:
    deep = json.loads('{"a":' * 600 + "1" + "}" * 600)
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": deep}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, *HELLO]
    body = {"model": MODEL, "messages": turns, "max_tokens": 2}
    answer = httpx.post(f"{running.url}/v1/messages", json=body)
    assert answer.status_code in (200, 400)


def test_texts_of_many_blocks_are_joined(running: RunningServer) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 400}]
    with client(running) as sdk:
        many = sdk.messages.count_tokens(model=MODEL, messages=turns)  # type: ignore[arg-type]
        one = sdk.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "\n".join("a" * 400)}]
        )
    assert many.input_tokens == one.input_tokens

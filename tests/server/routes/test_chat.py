"""`/v1/chat/completions` on the wire: chunks, headers, keepalive comments and messages."""

import json
from typing import Any

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.events import blocks, data
from tests.server.serving import MODEL, serve, settings, spec

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where is the lamp?"}]
HELLO: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "ignore_eos": True}


def stream(http: httpx.Client, **options: Any) -> list[Any]:
    with http.stream("POST", PATH, json=HELLO | {"stream": True} | options) as response:
        assert response.status_code == 200
        return list(data(response))


def ask(http: httpx.Client, **options: Any) -> Any:
    response = http.post(PATH, json=HELLO | options)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_stream_is_a_role_then_content_then_one_finish_for_each_choice(http: httpx.Client) -> None:
    chunks = stream(http, n=2)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all(
            set(choice["delta"]) == {"content"} and choice["finish_reason"] is None
            for choice in choices[1:-1]
        )
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk


def test_the_headers_of_a_stream_keep_proxies_from_holding_it_back(http: httpx.Client) -> None:
    with http.stream("POST", PATH, json=HELLO | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        response.read()


def test_usage_comes_last_in_a_chunk_without_choices(http: httpx.Client) -> None:
    *chunks, last = stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == ask(http)["usage"]


def test_continuous_usage_counts_up_to_the_final_one(http: httpx.Client) -> None:
    chunks = stream(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_every_byte_of_a_stream_is_ascii(http: httpx.Client) -> None:
    with http.stream("POST", PATH, json=HELLO | {"stream": True, "max_tokens": 300}) as response:
        body = response.read()
    assert body.isascii()


def test_an_omitted_limit_is_the_remaining_context(http: httpx.Client) -> None:
    answer = ask(http, max_tokens=None)
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_omitted_limit_leaves_no_room_after_too_long_a_prompt(http: httpx.Client) -> None:
    response = http.post(
        PATH, json=HELLO | {"max_tokens": None, "messages": [{"role": "user", "content": "lamp " * 2000}]}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 1024 tokens" in error["message"]


def test_max_completion_tokens_is_the_same_limit(http: httpx.Client) -> None:
    assert ask(http, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert ask(http, max_tokens=3, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_min_tokens_puts_the_end_off(http: httpx.Client, renderer: Renderer) -> None:
    [eos] = renderer.stop_token_ids
    wanted = {"temperature": 0, "max_tokens": 6, "ignore_eos": False, "logit_bias": {str(eos): 100}}
    assert ask(http, **wanted)["usage"]["completion_tokens"] == 1
    answer = ask(http, min_tokens=3, **wanted)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (4, "stop")


def test_a_stop_token_id_ends_an_answer_and_is_named(http: httpx.Client) -> None:
    answer = ask(http, temperature=0, logit_bias={"77": 100}, stop_token_ids=[77])
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", 77, "")


def test_the_stop_string_is_included_on_request(http: httpx.Client) -> None:
    text = ask(http, temperature=0)["choices"][0]["message"]["content"]
    stop = text[-4:]
    kept = ask(http, temperature=0, max_tokens=8, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (kept["message"]["content"], kept["stop_reason"]) == (text[: text.index(stop)] + stop, stop)


def test_text_parts_are_a_message(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "the lamp?"}]
    whole = ask(http, temperature=0, messages=[{"role": "user", "content": "Where is\nthe lamp?"}])
    assert (
        ask(http, temperature=0, messages=[{"role": "user", "content": parts}])["choices"] == whole["choices"]
    )


def test_an_answer_can_be_sent_back_as_it_came(http: httpx.Client) -> None:
    first = ask(http)["choices"][0]["message"]
    again = ask(http, messages=[*MESSAGES, first, {"role": "user", "content": "And now?"}])
    assert again["choices"][0]["message"]["content"]


def test_a_final_message_can_be_continued(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "The lamp is"}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    whole = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert whole.endswith("The lamp is")
    assert ask(http, temperature=0, **body)["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key", "service_tier"])
def test_inert_fields_change_nothing(http: httpx.Client, name: str) -> None:
    assert ask(http, temperature=0, **{name: "x"})["choices"] == ask(http, temperature=0)["choices"]


def test_neutral_values_of_unsupported_fields_pass(http: httpx.Client) -> None:
    ask(
        http,
        response_format={"type": "text"},
        modalities=["text"],
        tools=None,
        metadata={},
        store=False,
        echo=False,
        verbosity="medium",
    )
    ask(
        http,
        tool_choice="none",
        include_reasoning=True,
        separate_reasoning=True,
        stream_reasoning=True,
        reasoning_effort="none",
    )
    ask(http, chat_template_kwargs={"enable_thinking": False, "thinking": False})


def test_every_answer_has_a_different_id(http: httpx.Client) -> None:
    assert len({ask(http)["id"] for _ in range(3)}) == 3


def test_comments_keep_an_idle_stream_open_and_show_the_prefill(renderer: Renderer) -> None:
    long = {"messages": [{"role": "user", "content": "lamp " * 600}]}
    request = HELLO | long | {"stream": True, "stream_options": {"include_usage": True}}
    with (
        serve(renderer, settings(keepalive_interval=0.01), spec(num_slots=1), is_open=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        server.gate.let(2)
        with http.stream("POST", PATH, json=request) as response:
            events = blocks(response)
            comments = [next(events) for _ in range(3)]
            server.gate.open()
            rest = list(events)
    assert rest[-1] == "data: [DONE]"
    num_prompt_tokens = json.loads(rest[-2].removeprefix("data: "))["usage"]["prompt_tokens"]
    read, _, total = comments[-1].removeprefix(": prefill ").partition("/")
    assert 0 < int(read) < int(total) == num_prompt_tokens, comments


def test_nothing_is_sent_before_the_engine_has_accepted(renderer: Renderer) -> None:
    """A request that the queue's deadline ends has an error status, although a stream was requested."""
    with (
        serve(renderer, backend_spec=spec(num_slots=1)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        response = http.post(PATH, json=HELLO | {"stream": True, "queue_timeout": 1e-6})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_timeout"


def test_a_continued_message_is_echoed_on_request(http: httpx.Client) -> None:
    begun = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is"}]},
    ]
    options = {"messages": begun, "continue_final_message": True}
    alone, echoed = (
        ask(http, **options, echo=echo)["choices"][0]["message"]["content"] for echo in (False, True)
    )
    assert echoed == "It is" + alone
    streamed = [
        chunk["choices"][0]["delta"].get("content") or "" for chunk in stream(http, **options, echo=True)
    ]
    assert "".join(streamed) == echoed
    refused = http.post(PATH, json={"model": MODEL, "messages": begun, "echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")

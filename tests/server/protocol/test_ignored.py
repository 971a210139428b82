"""What changes nothing is accepted and named in a header: unknown parameters, and hints."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from server.options.models import DEMO_MODEL
from server.options.settings import UnknownParameters
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.serving import MODEL, RunningServer, serve, settings

HEADER = "x-ignored-parameters"
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [HELLO], "max_tokens": 2, "temperature": 0}
PATH = "/v1/chat/completions"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}

# Of vLLM, SGLang, llama.cpp, OpenRouter and OpenAI. Each with what the header says: itself, or nothing.
REPORTED: list[dict[str, Any]] = [
    {"temprature": 1},
    {"service_tier": "flex"},
    {"store": True},
    {"metadata": {"a": "b"}},
    {"verbosity": "low"},
    {"reasoning_effort": "low"},
    {"mm_processor_kwargs": {"a": 1}},
    {"kv_transfer_params": {"a": 1}},
    {"vllm_xargs": {"a": 1}},
    {"guided_decoding_backend": "xgrammar"},
    {"length_penalty": 2},
    {"cache_prompt": True},
    {"id_slot": 1},
    {"n_keep": 5},
    {"timings_per_token": True},
    {"samplers": ["top_k"]},
    {"bootstrap_host": "a"},
    {"data_parallel_rank": 1},
    {"provider": {"order": ["a"]}},
    {"models": ["a", "b"]},
    {"route": "fallback"},
    {"transforms": ["middle-out"]},
    {"usage": {"include": True}},
    {"session_id": "a"},
    {"structured_outputs": True},
    {"reasoning": {"max_tokens": 2000.0}},
    {"max_new_tokens": 7, "max_tokens": 2},
    {"n_probs": 2, "logprobs": False},
]
SILENT: list[dict[str, Any]] = [
    {"prediction": {"type": "content", "content": "x"}},
    {"anything": None},
    {"tools": []},
    {"tool_choice": "auto"},
    {"parallel_tool_calls": True},
    {"top_logprobs": 0},
    {"max_completion_tokens": 2, "max_tokens": 7},
    {"n_predict": -1, "max_completion_tokens": 2},
    {"bad_words": [], "allowed_token_ids": None},
    {"max_new_tokens": 2},
    {"repeat_penalty": 1.0, "repeat_last_n": 64},
    {"min_new_tokens": 1},
    {"no_stop_trim": True},
    {"extra_key": "a"},
    {"logit_bias": [[5, 1.5], [6, False]]},
    {"truncate_prompt_tokens": -1},
    {"add_special_tokens": True},
    {"service_tier": "auto", "metadata": {}, "store": False, "verbosity": "medium"},
    {"watermark": False, "n_probs": 0, "reasoning_budget_tokens": -2},
    {"watermark": {"enabled": False, "key": 1}, "reasoning": {"max_tokens": -1}},
    {"max_new_tokens": 2, "max_tokens": 2},
    {"include_reasoning": False, "reasoning": {"effort": "none", "exclude": True}},
    {"mirostat": 0, "typical_p": 1.0, "xtc_probability": 0.0, "dry_multiplier": 0, "top_n_sigma": -1},
    {"lora": [], "image_data": [], "plugins": [], "logits_processors": [], "stop_regex": []},
    {"return_hidden_states": False, "custom_logit_processor": None, "lora_path": None},
    {"stream": True, "stream_options": {"include_usage": True, "frequency": 1}},
    {"messages": [HELLO | {"mood": "good", "name": None, "tool_calls": None}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": None}, HELLO]},
    {
        "messages": [
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "audio": {"id": "a"}},
            HELLO,
        ]
    },
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO]},
    {
        "messages": [
            HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL | {"index": 0, "extra": 1}],
                "function_call": None,
                "annotations": [{"a": 1}],
                "provider_specific_fields": {"refusal": None},
                "reasoning_details": [],
            },
            {"role": "tool", "tool_call_id": "c", "content": None, "name": "f"},
        ]
    },
    {"tools": [FUNCTION | {"cache_control": {"type": "ephemeral"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "extra": 1, "strict": None}}]},
    {"tools": [{"type": "function", "function": {"name": f"mcp__server__{'x' * 100}"}}]},
]
# What would change the output is refused by name.
REFUSED: list[dict[str, Any]] = [
    {"mirostat": 2},
    {"typical_p": 0.5},
    {"xtc_probability": 0.5},
    {"dry_multiplier": 0.8},
    {"top_a": 0.5},
    {"lora": [{"id": 0, "scale": 1}]},
    {"return_hidden_states": True},
    {"custom_logit_processor": "x"},
    {"repeat_last_n": 64, "repeat_penalty": 1.1},
    {"plugins": [{"id": "web"}]},
    {"documents": [{"text": "a"}]},
    {"watermark": {"enabled": True}},
    {"watermark": True},
]


def name(value: dict[str, Any]) -> str:
    return str(value)[:60]


def ask(http: httpx.Client, change: dict[str, Any]) -> httpx.Response:
    response = http.post(PATH, json=CHAT | change)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("change", REPORTED, ids=name)
def test_a_parameter_that_changes_nothing_is_named(http: httpx.Client, change: dict[str, Any]) -> None:
    answer = ask(http, change)
    name, value = next(iter(change.items()))
    assert answer.headers[HEADER] == (f"{name}.{next(iter(value))}" if name == "reasoning" else name)
    assert answer.json()["choices"] == ask(http, {}).json()["choices"]


@pytest.mark.parametrize("change", SILENT, ids=name)
def test_what_is_usual_is_accepted_in_silence(http: httpx.Client, change: dict[str, Any]) -> None:
    assert HEADER not in ask(http, change).headers


@pytest.mark.parametrize("change", REFUSED, ids=name)
def test_what_would_change_the_output_is_refused(http: httpx.Client, change: dict[str, Any]) -> None:
    response = http.post(PATH, json=CHAT | change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(change)))


def test_several_names_are_counted_and_cannot_break_the_header(
    running: RunningServer, http: httpx.Client
) -> None:
    before = count(running)
    answer = ask(http, {"a": 1, "b": 2, "bad\r\nheader: x": 1, "c": None, "Zürich": 1})
    assert answer.headers[HEADER] == "a, b, ?"
    assert count(running) == before + 3
    many = ask(http, {f"field{number}": 1 for number in range(200)})
    assert len(many.headers[HEADER].split(", ")) == 32


def count(running: RunningServer) -> float:
    [line] = [
        line
        for line in running.observed.render().decode().splitlines()
        if line.startswith("snapserve:ignored_parameters_total{")
    ]
    return float(line.split()[-1])


def test_errors_name_them_too(http: httpx.Client) -> None:
    response = http.post(PATH, json=CHAT | {"temprature": 1, "temperature": 9})
    assert (response.status_code, response.headers[HEADER]) == (400, "temprature")


def test_other_routes_name_them(http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/embeddings": {"input": "a"},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        response = http.post(path, json=body | {"what": 1, "why": None})
        assert (response.status_code, response.headers[HEADER]) == (200, "what"), path


def test_the_request_id_is_the_end_of_the_answers(http: httpx.Client) -> None:
    assert [ask(http, {key: "mine"}).json()["id"] for key in ("request_id", "rid")] == ["chatcmpl-mine"] * 2
    assert http.post(PATH, json=CHAT | {"request_id": "a\nb"}).status_code == 400


def test_the_newer_token_limit_decides(http: httpx.Client) -> None:
    body = {"max_completion_tokens": 3, "max_tokens": 9, "ignore_eos": True}
    assert ask(http, body).json()["usage"]["completion_tokens"] == 3


def test_minus_one_truncates_to_the_room(http: httpx.Client) -> None:
    long = {"prompt": "word " * 3000, "max_tokens": 24, "truncate_prompt_tokens": -1}
    answer = http.post("/v1/completions", json=long).json()
    assert answer["usage"]["prompt_tokens"] == 1000  # of 1024
    assert http.post("/v1/completions", json=long | {"truncate_prompt_tokens": None}).status_code == 400


@pytest.fixture(scope="module")
def strict(renderer: Renderer) -> Iterator[httpx.Client]:
    with (
        serve(renderer, settings(unknown_parameters=UnknownParameters.REFUSE)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"frequency": 1}}, "stream_options.frequency"),
        ({"messages": [HELLO | {"mood": "good"}]}, "messages[0].mood"),
    ],
    ids=str,
)
def test_unknown_fields_are_refused_at_every_depth(
    strict: httpx.Client, change: dict[str, Any], param: str
) -> None:
    error = strict.post(PATH, json=CHAT | change).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", param)


def test_null_is_never_unknown(strict: httpx.Client) -> None:
    ask(strict, {"temprature": None, "messages": [HELLO | {"mood": None}]})


TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "|{{ verbosity }}|{{ reasoning_effort }}|{{ style }}|{# enable_thinking </think> #}"
)


def test_hints_and_variables_go_to_a_template_that_uses_them() -> None:
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inner.chat_template = TEMPLATE
    own = Renderer(Tokenizer(inner, {"eos_token_id": 2}))
    with serve(own) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        hints = {
            "verbosity": "low",
            "reasoning_effort": "high",
            "chat_template_kwargs": {"style": "odd <|end|>", "mood": 1},
        }
        tokens = ask(http, hints | {"return_token_ids": True})
        assert tokens.headers[HEADER] == "chat_template_kwargs.mood"
        text = http.post("/detokenize", json={"tokens": tokens.json()["prompt_token_ids"]}).json()["prompt"]
        assert text == "Hello|low|high|odd <|end|>|"
        ids = json.loads(tokens.text)["prompt_token_ids"]
        assert inner.convert_tokens_to_ids("<|end|>") not in ids
    own.close()

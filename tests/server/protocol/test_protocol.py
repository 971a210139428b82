"""Invalid values are refused with a status, a code and the parameter, before any work."""

import json
from typing import Any

import httpx
import pytest

from tests.server.serving import MODEL, VOCAB_SIZE

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
HUGE = 10**400
FUNCTION = {"type": "function", "function": {"name": "f"}}
NAMED_G = {"type": "function", "function": {"name": "g"}}

BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"temperature": float("inf")}, "temperature", "invalid_value"),
    ({"top_p": float("-inf")}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_p": -1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"top_k": HUGE}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 1e308}, "repetition_penalty", "invalid_value"),
    ({"max_tokens": -2}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": HUGE}, "max_tokens", "invalid_value"),
    ({"max_tokens": "8"}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 3}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": HUGE}, "n", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "a" * 257}, "stop", "invalid_value"),
    ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids[0]", "invalid_value"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {str(key): 1 for key in range(1025)}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(key): "x" for key in range(70_000)}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"priority": 1}, "priority", "unsupported_parameter"),
    ({"queue_timeout": 0}, "queue_timeout", "invalid_value"),
    ({"request_timeout": -1}, "request_timeout", "invalid_value"),
    ({"model": 5}, "model", "invalid_type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
        "invalid_value",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"guided_json": 5}, "guided_json", "invalid_type"),
    ({"guided_json": "{"}, "guided_json", "invalid_value"),
    ({"guided_json": "[]"}, "guided_json", "invalid_value"),
    ({"guided_json": {"not": {}}}, "guided_json", "invalid_value"),
    ({"guided_regex": "("}, "guided_regex", "invalid_value"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_choice": [""]}, "guided_choice[0]", "invalid_value"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "invalid_value"),
    ({"guided_grammar": "start:"}, "guided_grammar", "invalid_value"),
    ({"guided_grammar": "what is this"}, "guided_grammar", "invalid_value"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "unsupported_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "unsupported_parameter",
    ),
    ({"logits_processors": ["x"]}, "logits_processors", "unsupported_parameter"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"num_prefill_tokens": 0}, "num_prefill_tokens", "invalid_value"),
    ({"num_prefill_tokens": 10_000}, "num_prefill_tokens", "invalid_value"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
]

CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "Hello"}, "messages", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    ({"tools": [FUNCTION] * 2}, "tools", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]},
        "tools",
        "invalid_value",
    ),
    ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice", "invalid_value"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_value",
    ),
    (
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_G]}},
        },
        "tool_choice",
        "invalid_value",
    ),
    (
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [FUNCTION]}},
        },
        "tool_choice.allowed_tools.mode",
        "invalid_value",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
            ],
            "tool_choice": "required",
        },
        "tools",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"separate_reasoning": False}, "separate_reasoning", "unsupported_parameter"),
    ({"grammar": "start: A", "regex": "a"}, "grammar", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "invalid_value"),
    ({"verbosity": "endless"}, "verbosity", "invalid_value"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "invalid_value"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
        "invalid_value",
    ),
]

COMPLETION_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [""]}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[0]", "invalid_type"),
    ({"prompt": [-1]}, "prompt[0]", ""),
    ({"prompt": [VOCAB_SIZE]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 100, "n": 3}, "n", "invalid_value"),
    ({"prompt": "\udfff"}, "prompt", "invalid_value"),
    ({"best_of": 2}, "best_of", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"tools": [FUNCTION]}, "tools", "unsupported_parameter"),
]


def name(value: object) -> str:
    return str(value)[:60]


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"x"',
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b'{"\\ud800": 1}',
]


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    [(name, error)] = response.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return dict(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "param", "code"), [*BOTH, *CHAT_ONLY], ids=name)
def test_chat_refuses(
    http: httpx.Client, change: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    body = CHAT | change if not stream or "stream_options" in change else CHAT | {"stream": True} | change
    error = refusal(http, "/v1/chat/completions", body)
    assert error["param"] == param
    assert error["code"] == (code or error["code"])


@pytest.mark.parametrize(("change", "param", "code"), [*BOTH, *COMPLETION_ONLY], ids=name)
def test_completions_refuse(http: httpx.Client, change: dict[str, Any], param: str, code: str) -> None:
    error = refusal(http, "/v1/completions", COMPLETION | change)
    assert error["param"] == param
    assert error["code"] == (code or error["code"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", NO_REQUESTS, ids=lambda body: body[:20])
def test_no_body_is_more_than_wrong(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_with_too_many_fields_is_refused(http: httpx.Client) -> None:
    error = refusal(http, "/v1/chat/completions", {f"field{number}": 0 for number in range(100_000)})
    assert "100000 fields" in error["message"]

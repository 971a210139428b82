"""Every field of other servers' chats alone: it is accepted, or refused because it changes the output.

The fields are those of vLLM's and SGLang's request models as of 2026-11 (SGLang 0.5.23), of llama.cpp's
documentation and code, and of OpenRouter's documentation. Values are plausible ones that differ from the
field's default. Fields that need another one are left out: `continue_final_message`, and `tool_choice` with
a name.
"""

from typing import Any

import httpx
import pytest

from tests.server.serving import MODEL

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
    "temperature": 0,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}

OPENAI: dict[str, Any] = {
    "audio": None,
    "frequency_penalty": 0.5,
    "function_call": None,
    "functions": None,
    "logit_bias": {"5": 1.5},
    "logprobs": True,
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "a",
    "seed": 5,
    "service_tier": "flex",
    "stop": ["x"],
    "store": True,
    "stream": True,
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 0,
    "top_p": 0.5,
    "user": "a",
    "verbosity": "low",
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "OpenAI": OPENAI,
    "vLLM": {
        "thinking_token_budget": 5,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "allowed_token_ids": [5, 6],
        "bad_words": ["bad"],
        "cache_salt": "salt",
        "chat_template_kwargs": {"a": 1},
        "echo": True,
        "ec_transfer_params": {"a": 1},
        "guided_choice": ["yes", "no"],
        "guided_json": SCHEMA,
        "guided_regex": "[a-c]{1,3}",
        "ignore_eos": True,
        "include_reasoning": False,
        "include_stop_str_in_output": True,
        "kv_transfer_params": {"a": 1},
        "length_penalty": 2.0,
        "media_io_kwargs": {"image": {}},
        "min_p": 0.1,
        "min_tokens": 1,
        "mm_processor_kwargs": {"a": 1},
        "priority": 0,
        "prompt_logprobs": 1,
        "repetition_penalty": 1.2,
        "request_id": "abc",
        "return_mm_kwargs": False,
        "return_prompt_text": True,
        "return_token_ids": True,
        "return_token_offsets": True,
        "return_tokens_as_token_ids": True,
        "routed_experts_prompt_start": 3,
        "session_id": "a",
        "skip_special_tokens": False,
        "stop_token_ids": [5],
        "stream_interval": 5,
        "structured_outputs": {"choice": ["yes", "no"]},
        "top_k": 5,
        "truncate_prompt_tokens": 4,
        "truncation_side": "right",
        "vllm_xargs": {"a": 1},
    },
    "SGLang": {
        "stop_regex": "a+",
        "bootstrap_host": "a",
        "bootstrap_port": 1,
        "bootstrap_room": 1,
        "custom_params": {"a": 1},
        "data_parallel_rank": 1,
        "disagg_prefill_dp_rank": 1,
        "ebnf": 'root ::= "a"',
        "custom_labels": {"a": "b"},
        "extra_key": "a",
        "images_config": {"a": 1},
        "max_dynamic_patch": 1,
        "max_new_tokens": 2,
        "min_dynamic_patch": 1,
        "min_new_tokens": 1,
        "ngram_corpus_id": "a",
        "no_stop_trim": True,
        "reasoning_effort": 0.5,
        "regex": "[a-c]{1,3}",
        "return_cached_tokens_details": True,
        "return_flat_raw_top_logprobs_b64": False,
        "return_input_ids_in_sglext": True,
        "return_meta_info": True,
        "return_output_ids_in_sglext": True,
        "return_prompt_token_ids": True,
        "return_spec_tokens_details": True,
        "rid": "abc",
        "routed_dp_rank": 1,
        "routed_experts_start_len": 1,
        "task": "query",
        "thinking": {"type": "enabled"},
        "use_audio_in_video": True,
        "video_config": {"a": 1},
    },
    "llama.cpp": {
        "adaptive_decay": 0.9,
        "backend_sampling": True,
        "cache_prompt": True,
        "dry_allowed_length": 2,
        "dry_base": 1.75,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n"],
        "dynatemp_exponent": 1.0,
        "grammar": 'root ::= "a"',
        "id_slot": 0,
        "json_schema": SCHEMA,
        "logit_bias": [[5, 1.5]],
        "mirostat_eta": 0.1,
        "mirostat_tau": 5.0,
        "n_cache_reuse": 5,
        "n_cmpl": 2,
        "n_discard": 5,
        "n_keep": 5,
        "n_predict": 2,
        "n_probs": 1,
        "reasoning_budget_message": "a",
        "reasoning_budget_tokens": 5,
        "reasoning_control": True,
        "repeat_last_n": 64,
        "repeat_penalty": 1.1,
        "response_fields": ["content"],
        "return_progress": True,
        "return_tokens": True,
        "samplers": ["top_k"],
        "seed": -1,
        "speculative.n_max": 3,
        "sse_ping_interval": 5,
        "thinking_budget_tokens": 5,
        "timings_per_token": True,
        "xtc_threshold": 0.1,
    },
    "OpenRouter": {
        "cache_control": {"type": "ephemeral"},
        "debug": {"echo_upstream_body": True},
        "image_config": {"a": 1},
        "models": ["a", "b"],
        "preset": "a",
        "provider": {"order": ["a"]},
        "reasoning": {"effort": "high", "exclude": True},
        "route": "fallback",
        "session_id": "a",
        "structured_outputs": True,
        "trace": {"trace_id": "a"},
        "transforms": ["middle-out"],
        "usage": {"include": True},
    },
}
# These would change the output, and this server lacks them.
REFUSED: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "audio": {"voice": "alloy", "format": "wav"},
        "modalities": ["text", "audio"],
        "web_search_options": {},
    },
    "vLLM": {
        "chat_template": "{{ messages }}",
        "documents": [{"text": "a"}],
        "repetition_detection": {"max_pattern_size": 5},
        "spaces_between_special_tokens": False,
        "use_beam_search": True,
        "watermarking": True,
    },
    "SGLang": {
        "custom_logit_processor": "x",
        "input_ids": [5],
        "lora_path": "a",
        "return_flat_raw_output_top_logprobs": True,
        "return_hidden_states": True,
        "return_routed_experts": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "selected",
        "separate_reasoning": False,
        "session_params": {"id": "a"},
        "stream_reasoning": False,
        "watermark": {"enabled": True},
    },
    "llama.cpp": {
        "adaptive_target": 0.5,
        "dry_multiplier": 0.8,
        "dynatemp_range": 0.5,
        "image_data": [{"id": 1}],
        "lora": [{"id": 0, "scale": 1}],
        "min_keep": 1,
        "mirostat": 2,
        "n_indent": 4,
        "parse_tool_calls": False,
        "post_sampling_probs": True,
        "reasoning_format": "none",
        "t_max_predict_ms": 100,
        "tfs_z": 0.5,
        "thinking_forced_open": True,
        "top_n_sigma": 1.0,
        "typical_p": 0.5,
        "xtc_probability": 0.5,
    },
    "OpenRouter": {"plugins": [{"id": "web"}], "top_a": 0.5},
}


def each(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{server}-{name}")
        for server, fields in table.items()
        for name, value in fields.items()
    ]


def ask(http: httpx.Client, name: str, value: object) -> httpx.Response:
    return http.post(PATH, json=CHAT | {name: value})


@pytest.mark.parametrize(("name", "value"), each(ACCEPTED))
def test_a_field_alone_is_accepted(http: httpx.Client, name: str, value: object) -> None:
    response = ask(http, name, value)
    assert response.status_code == 200, response.text


def test_llama_cpp_s_spellings_have_their_effect(http: httpx.Client) -> None:
    def choices(**fields: object) -> Any:
        return http.post(PATH, json=CHAT | {"ignore_eos": True} | fields).json()["choices"]

    assert len(choices(n_cmpl=2)) == 2
    [choice] = choices(n_probs=2)
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2, 2]
    assert choices(n_probs=40) == choices(logprobs=True, top_logprobs=20)
    # The fields of this server decide.
    assert choices(n_probs=5, logprobs=True, top_logprobs=1) == choices(logprobs=True, top_logprobs=1)
    assert choices(n_probs=5, logprobs=False) == choices()
    hot = {"temperature": 2, "max_tokens": 24}
    assert choices(**hot, seed=7) == choices(**hot, seed=7)
    assert choices(**hot, seed=-1) != choices(**hot, seed=-1)


@pytest.mark.parametrize(("name", "value"), each(REFUSED))
def test_what_would_change_the_output_is_refused_by_name(
    http: httpx.Client, name: str, value: object
) -> None:
    response = ask(http, name, value)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert "not supported" in error["message"]
    assert ask(http, name, None).status_code == 200

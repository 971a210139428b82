"""Inputs that cannot be: each ends with status 2 and one message, never with a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands.cli import main

MODELS = Path("backends/sn40l/description/data/models")
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("llama-3.1-8b", change)
        for change in (
            {"num_attention_heads": 0},
            {"hidden_size": -4096},
            {"hidden_size": True},
            {"num_hidden_layers": 0},
            {"num_hidden_layers": 32.7},
            {"num_hidden_layers": 10**12},
            {"num_key_value_heads": 64},
            {"vocab_size": 0},
            {"intermediate_size": 0},
            {"intermediate_size": None},
            {"head_dim": 0},
            {"head_dim": "x"},
            {"dtype": "int3"},
            {"model_type": "bert"},
            {"model_type": None},
            {"layer_types": ["linear_attention"] * 32},
            {"layer_types": "full"},
            {"text_config": 3},
            {"quantization_config": {"quant_method": "x"}},
            {"quantization_config": [1]},
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            {"quantization_config": {"quant_method": "gptq", "bits": 5}},
            {"tie_word_embeddings": "perhaps"},
            {"sliding_window": -1},
            {"max_position_embeddings": -5},
        )
    ),
    *(
        ("mixtral-8x7b", change)
        for change in ({"num_experts_per_tok": 64}, {"num_experts_per_tok": None}, {"num_local_experts": -1})
    ),
    *(
        ("deepseek-r1", change)
        for change in (
            {"qk_rope_head_dim": 0},
            {"kv_lora_rank": -1},
            {"n_shared_experts": -1},
            {"mlp_only_layers": 5},
            {"mlp_only_layers": "a"},
            {"first_k_dense_replace": 61.5},
        )
    ),
]
MACHINES = [
    "=",
    "base = 3",
    'base = "h100"\nhbm_bandwidth = 3',
    *(
        f'base = "h100"\n[hbm_bandwidth]\nvalue = {value}\nsource = "a test"'
        for value in ("0", "-1", "nan", "inf", "true", '"a"', "[1]")
    ),
    'base = "h100"\n[max_sockets]\nvalue = 1.5\nsource = "a test"',
    'base = "h100"\n[loops_layers]\nvalue = 2\nsource = "a test"',
    'base = "h100"\n[launch]\nvalue = 1e-6\nsource = 3',
    'base = "h100"\n[launch]\nvalue = 1e-6\nsource = "a test"\nlow = "a"\nhigh = 3',
    'base = "h100"\n[launch]\nvalue = 1e-6\nsource = "a test"\nlow = 1e-7',
    'base = "h100"\n[wings]\nvalue = 2\nsource = "a test"',
]
ONE = '"num_prompt_tokens": 5, "num_output_tokens": 1'
TRACES = [
    ("trace.jsonl", text)
    for text in (
        "",
        "{}",
        "[]",
        "\0",
        '{"time": "a", "num_prompt_tokens": 1, "num_output_tokens": 1}',
        '{"time": 0, "num_prompt_tokens": "a", "num_output_tokens": 1}',
        '{"time": 0, "num_prompt_tokens": 1e999, "num_output_tokens": 1}',
        '{"timestamp": 0, "input_length": 5}',
        '{"time": 0, "hash_ids": 7, ' + ONE + "}",
        '{"time": 1, ' + ONE + '}\n{"time": 0, ' + ONE + "}",
        '{"time": 0, ' + ONE + '}\n{"time": 1e300, ' + ONE + "}",
        "[" * 100_000,
    )
] + [
    ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5"),
    ("trace.csv", "TIMESTAMP,ContextTokens\n2024-05-10 00:00:01,5"),
    ("trace.csv", "Timestamp,Request tokens,Response tokens\n1,2"),
    ("trace.csv", "a" * 200_000 + ",b\n1,2"),
]
FLAGS = """\
plan --context 0
plan --max-tpot nan
plan --percentile 0
plan --sockets 0
plan --sockets ,
plan --rate 0
plan --tokens-per-step 0
plan --price -3
plan --acceptance 2
plan --prefix-cache-bytes -1
plan --kubernetes /nowhere/k.yaml
sweep --batches 0
sweep --batches 1,a
sweep --executions slow
step --batch 0
step --batch 1e3
step --batch 100000000000
step --prefill 0
step --sockets 99
step --nodes 1000 --machine h100
step --model /tmp
step --machine /nowhere.toml
step --machine /tmp
replay --num-slots 0
replay --num-slots 10000000000
replay --shape square
replay --rate 1e-9
replay --max-model-len 0
replay --mean-prompt 0
replay --max-inter-token-latency 0
replay --speculative-prefill-threshold 0
replay --series /nowhere/s.csv
measure --context 5
measure --repeats 0
measure --output /nowhere/x.toml""".splitlines()


def check_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    assert main(["simulate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("snapserve simulate: ")
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("model", "changes"), CONFIGS, ids=lambda value: str(value)[:60])
def test_a_config_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, changes: dict[str, Any]
) -> None:
    config = json.loads((MODELS / f"{model}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_refusal(capsys, "step", "--model", str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe\0", b"[" * 100_000])
def test_a_config_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    check_refusal(capsys, "step", "--model", str(tmp_path))


@pytest.mark.parametrize("text", MACHINES)
def test_a_machine_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.toml").write_text(text)
    check_refusal(capsys, "step", "--machine", str(tmp_path / "odd.toml"))


@pytest.mark.parametrize(("name", "text"), TRACES, ids=lambda value: str(value)[:60])
def test_a_trace_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    check_refusal(capsys, "replay", "--trace", str(tmp_path / name))


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    check_refusal(capsys, *flags.split())


def test_a_request_beyond_all_memory_is_refused_as_too_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"time": 0, "num_prompt_tokens": 99999999999, "num_output_tokens": 1}')
    assert main(["simulate", "replay", "--trace", str(trace), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["requests"], values["refused"]) == (0, 1)

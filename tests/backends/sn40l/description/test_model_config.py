"""Model descriptions beside model cards, published rows and transformers' own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from backends.sn40l.description.model_config import (
    ModelConfigError,
    load_model,
    model_from_config,
    model_names,
)

BILLIONS = {  # as the model cards say
    "llama-3.2-1b": (1.24, 1.24),
    "llama-3.2-3b": (3.21, 3.21),
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.6, 70.6),
    "llama-3.1-405b": (405.9, 405.9),
    "qwen2.5-7b": (7.62, 7.62),
    "qwen2.5-32b": (32.8, 32.8),
    "qwen2.5-72b": (72.7, 72.7),
    "qwen3-0.6b": (0.596, 0.596),
    "qwen3-4b": (4.02, 4.02),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "gpt-oss-120b": (116.8, 5.1),
    "deepseek-r1": (671, 37),
    "deepseek-v3": (671, 37),
    "minimax-m2": (230, 10),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
}


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    """Model cards differ in counting embeddings and in rounding: 5 % are allowed for active parameters."""
    total, active = BILLIONS[name]
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(total, rel=0.012)
    table = 0 if model.is_tied else model.embedding_params
    assert (
        min(
            abs(count / 1e9 / active - 1)
            for count in (model.num_active_params, model.num_active_params + table)
        )
        < 0.05
    )


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-v3"])
def test_parameters_are_those_that_transformers_makes(name: str) -> None:
    config = json.loads(Path("backends/sn40l/description/data/models", f"{name}.json").read_text())
    config.pop("quantization_config", None)
    kind = config.pop("model_type")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))  # type: ignore[no-untyped-call]
    assert load_model(name).num_params == pytest.approx(
        sum(parameter.numel() for parameter in made.parameters()), rel=1e-3
    )


def test_published_characterisation_row() -> None:
    """Llama 3.1 8B, BF16, batch 1, 4k (arXiv 2410.23668, table 1)."""
    model, gib = load_model("llama-3.1-8b"), 2**30
    assert model.weight_bytes / gib == pytest.approx(14.9, abs=0.1)
    assert model.cache_bytes(4096) / gib == 0.5
    assert (model.weight_bytes + model.cache_bytes(4096)) / gib == pytest.approx(15.4, abs=0.1)


def test_published_cache_of_deepseek_r1() -> None:
    assert load_model("deepseek-r1").cache_bytes(1) == 576 * 2 * 61


def test_sliding_windows_bound_their_layers() -> None:
    model = load_model("gpt-oss-120b")
    per_token = 2 * 8 * 64 * 2
    assert model.cache_bytes(100_000) == 18 * per_token * 128 + 18 * per_token * 100_000


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_expected_experts_lie_between_one_choice_and_the_most(num_tokens: int) -> None:
    experts = next(layer.experts for layer in load_model("deepseek-r1").layers if layer.experts)
    assert (
        experts.num_chosen - 1e-9
        <= experts.expected_touched(num_tokens)
        <= experts.most_touched(num_tokens) + 1e-9
    )


def test_expected_experts_of_the_published_batches() -> None:
    experts = next(layer.experts for layer in load_model("deepseek-r1").layers if layer.experts)
    assert [round(experts.expected_touched(batch) / 256, 2) for batch in (16, 64)] == [0.4, 0.87]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"model_type": "bert"}, "model_type must be one of .*got 'bert'"),
        ({"model_type": "starcoder2"}, "model_type must be one of .*got 'starcoder2'"),
        ({"model_type": None}, "model_type must be one of .*got None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ({"hidden_size": -4096}, "hidden_size must be a whole number of at least 1, got -4096"),
        ({"hidden_size": 4097}, "hidden_size must be a multiple of the 32 heads"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number .*got '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be .*got -3"),
        ({"num_hidden_layers": 32.7}, "num_hidden_layers must be .*got 32.7"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be .*got True"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        ({"num_key_value_heads": 64}, "num_key_value_heads must divide the 32 heads, got 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"intermediate_size": -1}, "intermediate_size must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"num_local_experts": 8, "num_experts_per_tok": 64}, "num_experts_per_tok must be at most 8"),
        ({"num_local_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok must be"),
        ({"num_local_experts": 8}, "has no 'num_experts_per_tok'"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types must be of .*got linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must have 32 entries, one a layer, got 1"),
        ({"sliding_window": -1}, "sliding_window must be"),
        ({"torch_dtype": "float7"}, "dtype must be one of .*got 'float7'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method must be one of .*got 'hqq'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 5}}, "2, 3, 4, 8 or 16 bits, got 5"),
        ({"quantization_config": {"quant_method": "gptq", "group_size": 0}}, "group_size must be"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "8 or 16 bits, got None"),
        ({"text_config": 3}, "none of a decoder"),
    ],
)
def test_missing_and_unknown_values_are_named(changes: dict[str, Any], message: str) -> None:
    config = (
        json.loads(Path("backends/sn40l/description/data/models/llama-3.1-8b.json").read_text()) | changes
    )
    with pytest.raises(ModelConfigError, match=message):
        model_from_config("x", {key: value for key, value in config.items() if value is not None})


def test_models_come_from_folders_and_unknown_names_are_refused() -> None:
    demo = load_model("server/demo_model")
    assert demo.num_params > 0
    with pytest.raises(ModelConfigError, match=r"no model 'gpt-9'.*llama-3\.1-8b"):
        load_model("gpt-9")


@pytest.mark.parametrize(
    "config", [[], {"num_hidden_layers": None}, {"num_hidden_layers": 2, "hidden_size": "wide"}]
)
def test_an_invalid_config_is_refused(config: Any) -> None:
    with pytest.raises(ModelConfigError, match="the configuration of x "):
        model_from_config("x", config)


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}},
            },
            8,
        ),
    ],
)
def test_quantised_checkpoints_have_the_bytes_of_their_bits(quantised: dict[str, Any], bits: float) -> None:
    config = json.loads(Path("backends/sn40l/description/data/models/llama-3.1-8b.json").read_text())
    plain = model_from_config("x", config)
    packed = model_from_config("x", config | {"quantization_config": quantised})
    embeddings = 2 * plain.embedding_params * 2
    assert (packed.weight_bytes - embeddings) / (plain.weight_bytes - embeddings) == pytest.approx(bits / 16)
    assert packed.cache_bytes(1) == plain.cache_bytes(1)


def test_a_pattern_of_windows_leaves_every_so_many_layers_full() -> None:
    config = json.loads(Path("backends/sn40l/description/data/models/llama-3.1-8b.json").read_text())
    gemma = model_from_config(
        "x", config | {"model_type": "gemma3", "sliding_window": 512, "num_hidden_layers": 12}
    )
    assert [layer.attention.window for layer in gemma.layers] == [512, 512, 512, 512, 512, None] * 2

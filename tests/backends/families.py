"""Tiny checkpoints with random weights of transformers' model types, in the layout of the published ones.

`FAMILIES` has the model types of the matrix in `docs/reference/models.md`, each with what its configuration
needs beside `_TEXT`. A model with other parts than text has all its parts, and is saved whole.
"""

import copy
import inspect
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.backends.checkpoints import VOCAB_SIZE

_WINDOW: Final = 11
_WEIGHT_STD: Final = 0.2
_NORM_STD: Final = 0.1
# A configuration takes those of these that it has.
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": _WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
# The parts that the server does not load, if they have such a size.
_OTHER_PART: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "hidden_dim": 32,
}
_TEXT_PARTS: Final = ("text_config", "thinker_config", "llm_config")
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": None,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_GROWING_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
_MROPE: Final[dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
}
_MROPE_HALF: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
# The last two layers attend to what the first two store.
_SHARING: Final[dict[str, Any]] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}

_MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
_INDEXED: Final[dict[str, Any]] = {
    **_LATENT,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, many entries are equally good: their rank is 0
}
_DELTA_NET: Final[dict[str, Any]] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_CONVOLUTIONS: Final[dict[str, Any]] = {"layer_types": ["conv", "full_attention"] * 2}

# What each type needs beside `_TEXT`; `None` leaves an item out. The name of another part leads to its items.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    # Text.
    "afmoe": {"num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cwm": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {**_SHARING, "laurel_rank": 8},
    "gemma4_text": {**_SHARING, "global_head_dim": 32},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_intermediate_size": 64,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.7,
    },
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "internlm3": {},
    "jais2": {},
    "laguna": {},
    "kimi_linear": {
        **_LATENT,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": {**_CONVOLUTIONS, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "llama": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": _LATENT,
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": _DELTA_NET,
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": _DELTA_NET,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "starcoder2": {},
    "vaultgemma": {},
    "youtu": _LATENT,
    # Text and other parts.
    "aria": {},
    "aya_vision": {},
    "cohere2_vision": {},
    "exaone4_5": {},
    "gemma3": {},
    "gemma4": {
        **_SHARING,
        "global_head_dim": 32,
        "vision_config": {
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "position_embedding_size": 32,
        },
    },
    "glm4v": _MROPE,
    "glm4v_moe": _MROPE_HALF,
    "got_ocr2": {},
    "granite_speech": {},
    "idefics3": {},
    "internvl": {},
    "kimi_k25": _LATENT,
    "llama4": {},
    "llava": {},
    "llava_next": {},
    "mistral3": {},
    "mistral4": {**_LATENT, "rope_parameters": _GROWING_ROPE},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "smolvlm": {},
    # Refused.
    "bert": {},
    "bloom": {},
    "diffllama": {},
    "doge": {},
    "falcon": {},
    "falcon_mamba": {},
    "gptj": {},
    "jamba": {},
    "jetmoe": {},
    "mamba": {},
    "minimax": {},
    "mpt": {},
    "nemotron": {},
    "paligemma": {},
    "recurrent_gemma": {},
    "stablelm": {},
}


def model_class(config: PreTrainedConfig) -> Any:
    """Return the class that reads the whole checkpoint."""
    for mapping in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        found = mapping.get(type(config), None)
        if found is not None:
            return found
    raise KeyError(config.model_type)


def tiny_config(model_type: str, **change: Any) -> PreTrainedConfig:
    """Return the configuration of a tiny model. `change` is what its text part needs beside `FAMILIES`."""
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    items = copy.deepcopy(FAMILIES.get(model_type, {}) | change)
    parts = getattr(kind, "sub_configs", {})
    text_part = next((name for name in _TEXT_PARTS if name in parts), None)
    if text_part is None:
        return kind(**_text_items(kind, items))
    defaults = kind()
    chosen: dict[str, Any] = {}
    for name in parts:
        default = getattr(defaults, name, None)
        others = items.pop(name, {})
        if default is None and others:
            default = CONFIG_MAPPING[others["model_type"]]()
        if default is not None and name != text_part:
            small = {key: value for key, value in _OTHER_PART.items() if hasattr(default, key)}
            chosen[name] = {"model_type": default.model_type, **small, **others}
    text = getattr(defaults, text_part)
    chosen[text_part] = {"model_type": text.model_type, **_text_items(type(text), items)}
    if "tie_word_embeddings" in _fields(kind):
        chosen["tie_word_embeddings"] = items.get("tie_word_embeddings", False)
    return kind(**chosen)


def _text_items(kind: type[PreTrainedConfig], items: dict[str, Any]) -> dict[str, Any]:
    known = _fields(kind)
    return {
        **{name: value for name, value in _TEXT.items() if name in known and name not in items},
        **{name: value for name, value in items.items() if value is not None},
    }


def _fields(kind: type[PreTrainedConfig]) -> set[str]:
    annotated = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    return annotated | set(inspect.signature(kind).parameters) | set(kind.attribute_map)


def save_tiny(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint of random weights to `folder`; return the whole model in float32."""
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config)(config).float()
    _randomise(model, seed)
    model.save_pretrained(folder)
    reloaded: PreTrainedModel = model_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return reloaded


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights, as `checkpoints` does: attention is far from uniform, and no part can be left out."""
    generator = torch.Generator().manual_seed(seed)
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = model.get_input_embeddings().weight
    is_tied = output is not None and output.weight is embedding
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() <= 1:
                parameter.add_(noise * _NORM_STD)
            else:
                # Tied, the best token would otherwise be the one just read.
                parameter.copy_(
                    noise * (_WEIGHT_STD / 16 if is_tied and parameter is embedding else _WEIGHT_STD)
                )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _NORM_STD)


def edit_weights(folder: Path, edited: dict[str, Tensor]) -> None:
    """Replace all weights of a checkpoint in one file."""
    save_file(edited, folder / "model.safetensors", metadata={"format": "pt"})


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint in one file."""
    return load_file(folder / "model.safetensors")

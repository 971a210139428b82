"""Tiny checkpoints of real architectures with random weights, written to disk as published ones are: a folder of config and safetensors.

The weights are drawn large enough that attention is far from uniform and that the best token leads by a healthy margin; norms and biases,
which their architectures would leave at 1 and 0, are drawn too, so that a part that is left out shows.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
SLIDING_WINDOW = 11
_WEIGHT_STD = 0.2
_NORM_STD = 0.1
# Chunks of more than 5 tokens are read with keys and values made of the latents.
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}


def _config(architecture: str) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    match architecture:
        case "llama":
            return LlamaConfig(**common, rope_parameters=llama3_rope)
        case "mistral":
            return MistralConfig(**common, sliding_window=None, head_dim=16)
        case "mistral-sliding":
            return MistralConfig(**{**common, "intermediate_size": 128}, sliding_window=SLIDING_WINDOW, head_dim=16)
        case "qwen2":
            return Qwen2Config(**{**common, "num_key_value_heads": 1})
        case "qwen3":
            return Qwen3Config(**common, head_dim=24)
        case "phi3":
            return Phi3Config(**{**common, "num_key_value_heads": 4})
        case "granite":
            return GraniteConfig(
                **common,
                attention_multiplier=0.2,
                embedding_multiplier=3.0,
                residual_multiplier=0.7,
                logits_scaling=0.8,
                tie_word_embeddings=True,
            )
        case "olmo2":
            return Olmo2Config(**common)
        case "gemma2":
            return Gemma2Config(
                **common,
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=SLIDING_WINDOW,
                layer_types=alternating,
                attn_logit_softcapping=3.0,
                final_logit_softcapping=8.0,
            )
        case "gemma3":
            return Gemma3TextConfig(**common, head_dim=16, query_pre_attn_scalar=16, sliding_window=SLIDING_WINDOW, layer_types=alternating)
        case "afmoe":  # a mixture of experts, and picky about the memory layout of what attention returns
            experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
            return AfmoeConfig(**common, **experts, head_dim=16, sliding_window=SLIDING_WINDOW, layer_types=alternating)
        case "deepseek-v2":  # as V2 Lite, whose queries have no latent of their own, with the routing of the larger V2
            return DeepseekV2Config(**common | _LATENT | _EXPERTS, q_lora_rank=None, topk_method="group_limited_greedy")
        case "deepseek-v3":
            yarn_rope = {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
            return DeepseekV3Config(**common | _LATENT | _EXPERTS, q_lora_rank=24, rope_parameters=yarn_rope)
    raise ValueError(f"no tiny checkpoint of {architecture}")


ARCHITECTURES = (
    "llama",
    "mistral",
    "mistral-sliding",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "olmo2",
    "gemma2",
    "gemma3",
    "afmoe",
    "deepseek-v2",
    "deepseek-v3",
)


def save_checkpoint(architecture: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of `architecture` to a new folder inside `folder` and return its path."""
    model = AutoModelForCausalLM.from_config(_config(architecture), dtype=torch.float32)  # type: ignore[no-untyped-call]
    _randomise(model, seed)
    path = folder / f"{architecture}-{seed}"
    model.save_pretrained(path)
    return path


def load_oracle(path: Path) -> PreTrainedModel:
    """Load a checkpoint the way any user of transformers would."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * _NORM_STD)  # norms stay around 1 (Gemma: around 0, of which it takes 1 +), biases around 0
            elif is_tied and "embed_tokens" in name:
                parameter.copy_(noise * _WEIGHT_STD / 16)  # larger, and the best token would always be the one just read
            else:
                parameter.copy_(noise * _WEIGHT_STD)
            if is_tied and name == "model.norm.weight":
                parameter.add_(15.0)  # gives the logits the scale back
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _NORM_STD)

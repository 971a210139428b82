"""Tiny checkpoints of real architectures with random weights, as folders of a config and safetensors.

The weights are drawn large enough that attention is far from uniform and that the best token leads by a
healthy margin; norms and biases, which their architectures would leave at 1 and 0, are drawn too, so that a
part that is left out shows.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCAB_SIZE = 320
SLIDING_WINDOW = 11
_WEIGHT_STD = 0.2
_NORM_STD = 0.1
# Chunks of more than 5 tokens are read with keys and values made of the latents.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 4,
    "topk_group": 2,
}


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,  # the first and the last; architectures with a pattern of layers have three
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
_ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "head_dim": 16,
}
_SOFTCAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
_AFMOE_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_dense_layers": 1,
}

_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {  # what is not as in `_COMMON`
    "llama": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral-sliding": (
        MistralConfig,
        {"intermediate_size": 128, "sliding_window": SLIDING_WINDOW, "head_dim": 16},
    ),
    # Learned positions, and a model that gives what its last layer returns the shape of its tokens.
    "gpt2": (GPT2Config, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "phi3": (Phi3Config, {"num_key_value_heads": 4}),
    "granite": (GraniteConfig, {**_GRANITE, "tie_word_embeddings": True}),
    "olmo2": (Olmo2Config, {"num_hidden_layers": 3}),
    "gemma2": (Gemma2Config, {**_ALTERNATING, **_SOFTCAPS, "query_pre_attn_scalar": 16}),
    "gemma3": (Gemma3TextConfig, {**_ALTERNATING, "query_pre_attn_scalar": 16}),
    # Mamba-2 and attention in each layer, and gated delta nets before attention. Mamba's chunks are shorter
    # than a prompt's.
    "falcon-h1": (
        FalconH1Config,
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_chunk_size": 4,
            "key_multiplier": 0.7,
        },
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "mlp_only_layers": [0, 1, 2],
        },
    ),
    # A delta net with a decay for each channel, and latents without positions.
    "kimi-linear": (
        KimiLinearConfig,
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
        },
    ),
    # Short convolutions before and after attention.
    "lfm2": (
        Lfm2Config,
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    # A mixture of experts, and picky about the memory layout of what attention returns.
    "afmoe": (AfmoeConfig, {**_ALTERNATING, **_AFMOE_EXPERTS}),
    # As V2 Lite, whose queries have no latent of their own, with the routing of the larger V2.
    "deepseek-v2": (
        DeepseekV2Config,
        {**_LATENT, **_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": (
        DeepseekV3Config,
        {**_LATENT, **_EXPERTS, "q_lora_rank": 24, "rope_parameters": _YARN_ROPE},
    ),
    # An indexer chooses six entries for each query. With few heads, many entries would have the rank 0.
    "deepseek-v32": (
        DeepseekV32Config,
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": 24,
            "index_topk": 6,
            "index_head_dim": 16,
            "index_n_heads": 16,
        },
    ),
}
HYBRIDS = ("falcon-h1", "kimi-linear", "qwen3-next")
INDEXED = ("deepseek-v32",)  # the reference computes no attention with masks
ARCHITECTURES = tuple(name for name in _CONFIGS if name not in (*HYBRIDS, *INDEXED))


def save_checkpoint(architecture: str, folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write a checkpoint of `architecture` to a new folder inside `folder` and return its path.

    `changes` are settings of its config that differ from the usual ones.
    """
    kind, settings = _CONFIGS[architecture]
    config = kind(**copy.deepcopy(_COMMON | settings | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    _randomise(model, seed)
    path = folder / f"{architecture}-{seed}"
    model.save_pretrained(path)
    return path


def load_oracle(path: Path) -> PreTrainedModel:
    """Load a checkpoint the way any user of transformers would."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise - 1.0)  # states fade slowly
            elif parameter.dim() == 1:
                parameter.add_(
                    noise * _NORM_STD
                )  # norms stay around 1 (Gemma: around 0, of which it takes 1 +), biases around 0
            elif is_tied and "embed_tokens" in name:
                parameter.copy_(
                    noise * _WEIGHT_STD / 16
                )  # larger, and the best token would always be the one just read
            else:
                parameter.copy_(noise * _WEIGHT_STD)
            if is_tied and name == "model.norm.weight":
                parameter.add_(15.0)  # gives the logits the scale back
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _NORM_STD)

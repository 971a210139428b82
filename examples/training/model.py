"""Helpers for all models: special ids, greedy generation, and the layers' forward pass in training."""

from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

Model = LlamaForCausalLM | Qwen3ForCausalLM


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the special token ids under the names that configurations have for them."""
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def greedy_generation(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return a configuration that decodes greedily."""
    return GenerationConfig(**special_ids(tokenizer), do_sample=False)  # type: ignore[no-untyped-call]


def hidden_states(model: Model, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run the layers under causal attention and return their normalized output [sequence, position, hidden].

    The model's own `forward` takes a skip in the positions for the border of a packed sequence. It then
    attends to nothing before the skip.
    """
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    normed: torch.Tensor = model.model.norm(hidden)
    return normed

"""Multi-head latent attention over slots (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache of a token is a latent, from which a matrix makes each head's key and value, and one rotary key for
all heads. Slots and scratches store both side by side, in one plane of one head. Few queries attend to the
latents directly: a head's key matrix is applied to its query, and its value matrix to the output (weight
absorption, section 2.1.2). For many queries, keys and values are expanded from the latents first, since
products with them are shorter.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from backends.torch_backend.model.attention import AttentionCache, AttentionOptions

# The model types, in transformers' names, whose attention is replaced here.
LATENT_MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3"})

_Rotation = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]


class LatentCache(AttentionCache, Protocol):
    """The cache that attention over latents calls."""

    def store(self, layer: int, latents: Tensor) -> Tensor:
        """Write a step's latents with their rotary keys [row, 1, token, width].

        Returns the latents that its queries see.
        """
        ...


class LatentAttention(nn.Module):
    """Replaces a DeepSeek attention. It has the same parts under the same names."""

    q_proj: nn.Module  # or the next three
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Module

    def __init__(self, origin: deepseek_v2.DeepseekV2Attention | deepseek_v3.DeepseekV3Attention) -> None:
        super().__init__()
        for name, part in origin.named_children():
            self.add_module(name, part)
        self.layer_idx = origin.layer_idx
        self._scaling = origin.scaling
        self._rank = origin.kv_lora_rank
        self._rope_width = origin.qk_rope_head_dim
        self._num_heads = origin.num_heads
        self._has_query_rank = origin.q_lora_rank is not None
        self._key_width = origin.qk_nope_head_dim
        self._value_width = origin.kv_b_proj.out_features // origin.num_heads - origin.qk_nope_head_dim
        self._rotate = _rotation(origin)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, slot_cache: LatentCache, **_: object
    ) -> tuple[Tensor, None]:
        """Return the output [row, token, hidden]. `position_embeddings` are the model's."""
        rows, tokens = hidden_states.shape[:2]
        query = self._query(hidden_states).view(rows, tokens, self._num_heads, -1).transpose(1, 2)
        query, rotary_query = torch.split(query, [self._key_width, self._rope_width], dim=-1)
        latent, rotary_key = torch.split(
            self.kv_a_proj_with_mqa(hidden_states)[:, None], [self._rank, self._rope_width], dim=-1
        )
        rotary_query, rotary_key = self._rotate(rotary_query, rotary_key, position_embeddings)
        held = slot_cache.store(self.layer_idx, torch.cat([self.kv_a_layernorm(latent), rotary_key], dim=-1))
        attend = self._attend_absorbed if self.absorbs(tokens) else self._attend_expanded
        return self.o_proj(attend(query, rotary_query, held, slot_cache).flatten(2)), None

    def absorbs(self, num_queries: int) -> bool:
        """Return whether attention to the latents needs fewer multiplications than expanded keys and values.

        Absorbed products are longer for each query. Expansion costs once for each head and entry.
        """
        width = self._key_width + self._value_width
        return num_queries * (2 * self._rank - width) <= self._rank * width

    def _query(self, hidden: Tensor) -> Tensor:
        query: Tensor = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
            if self._has_query_rank
            else self.q_proj(hidden)
        )
        return query

    def _attend_absorbed(
        self, query: Tensor, rotary_query: Tensor, held: Tensor, cache: LatentCache
    ) -> Tensor:
        """Attend to the latents; return [row, token, head, value width]."""
        # Products are associative: (query · to_key) · latent equals query · (to_key · latent), the score with
        # the expanded key. The value matrix is applied to the weighted sum of the latents likewise.
        weight = self.kv_b_proj.weight.view(self._num_heads, -1, self._rank)
        to_key, to_value = torch.split(weight, [self._key_width, self._value_width], dim=1)
        absorbed = torch.cat([torch.einsum("rhtk,hkl->rhtl", query, to_key), rotary_query], dim=-1)
        mixed = self._attend(cache, absorbed, held, held[..., : self._rank])
        return torch.einsum("rthl,hvl->rthv", mixed, to_value)

    def _attend_expanded(
        self, query: Tensor, rotary_query: Tensor, held: Tensor, cache: LatentCache
    ) -> Tensor:
        """Attend to expanded keys and values; return [row, token, head, value width]."""
        latent, rotary_key = torch.split(held[:, 0], [self._rank, self._rope_width], dim=-1)
        expanded = linear(latent, self.kv_b_proj.weight)
        heads = expanded.view(*latent.shape[:2], self._num_heads, -1).transpose(1, 2)
        key, value = torch.split(heads, [self._key_width, self._value_width], dim=-1)
        key = torch.cat([key, rotary_key[:, None].expand(-1, self._num_heads, -1, -1)], dim=-1)
        return self._attend(cache, torch.cat([query, rotary_query], dim=-1), key, value)

    def _attend(self, cache: LatentCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cache.attend(self.layer_idx, query, key, value, AttentionOptions(self._scaling))


def replace_latent_attention(model: PreTrainedModel) -> None:
    """Replace the attention of every layer, where it is DeepSeek's."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, deepseek_v2.DeepseekV2Attention | deepseek_v3.DeepseekV3Attention):
                setattr(module, name, LatentAttention(part))


def _rotation(attention: nn.Module) -> _Rotation:
    """Return the function that rotates queries and keys by the output of the model's rotary embedding."""
    if isinstance(attention, deepseek_v2.DeepseekV2Attention):
        rotate_pairs: _Rotation = deepseek_v2.apply_rotary_emb
        return rotate_pairs
    is_interleaved = attention.config.rope_interleave  # type: ignore[union-attr]
    rotate = (
        deepseek_v3.apply_rotary_pos_emb_interleave if is_interleaved else deepseek_v3.apply_rotary_pos_emb
    )
    return lambda query, key, angles: rotate(query, key, *angles)

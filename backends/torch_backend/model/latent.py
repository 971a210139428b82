"""Multi-head latent attention over slots (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache of a token is a latent, from which a matrix makes each head's key and value, and one rotary key for
all heads. Slots and scratches store both side by side, in one plane of one head. Few queries attend to the
latents directly: a head's key matrix is applied to its query, and its value matrix to the output (weight
absorption, section 2.1.2). For many queries, keys and values are expanded from the latents first, since
products with them are shorter. Of a model with an indexer (DeepSeek-V3.2, GLM-5), the keys that it ranks
entries by lie behind them in the plane.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.model.attention import AttentionCache, AttentionOptions
from backends.torch_backend.model.indexer import Indexer
from backends.torch_backend.model.linear import plain_linear
from backends.torch_backend.torch_private import onednn

# The attention that is replaced here, by transformers' names of model types.
_ATTENTIONS = {
    "deepseek_v2": "DeepseekV2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "deepseek_v32": "DeepseekV32Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
    "kimi_linear": "KimiLinearAttention",
    "minicpm3": "MiniCPM3Attention",
    "mistral4": "Mistral4Attention",
    "youtu": "YoutuAttention",
}
LATENT_MODEL_TYPES = frozenset(_ATTENTIONS)

_Rotation = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
_Attend = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]  # a layer's `AttentionCache.attend`


class LatentCache(AttentionCache, Protocol):
    """The cache that attention over latents calls."""

    def store(self, layer: int, latents: Tensor) -> Tensor:
        """Write a step's latents with their rotary keys [row, 1, token, width].

        Returns the latents that its queries see.
        """
        ...


class LatentAttention(nn.Module):
    """Replaces an attention of `_ATTENTIONS`. It has the same parts under the same names."""

    q_proj: nn.Module  # or the next three
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Module

    def __init__(self, origin: Any) -> None:
        super().__init__()
        for name, part in origin.named_children():
            self.add_module(name, part)
        self.layer_idx = origin.layer_idx
        self._scaling = origin.scaling
        self._rank: int = origin.kv_lora_rank
        self._rope_width = origin.qk_rope_head_dim
        self._num_heads = origin.num_heads
        self._has_query_rank = origin.q_lora_rank is not None
        self._key_width: int = origin.qk_nope_head_dim
        self._value_width: int = origin.kv_b_proj.out_features // origin.num_heads - origin.qk_nope_head_dim
        self._rotate = _rotation(origin)
        self._indexer = Indexer(origin) if hasattr(origin, "indexer") else None
        # Where layers may share an indexer's choice, they expect it behind the output. None of these does.
        self._choice = (None,) if type(origin).__name__ == _ATTENTIONS["glm_moe_dsa"] else ()
        parameters = getattr(origin.config, "rope_parameters", None) or {}
        self._growth: float | None = parameters.get("llama_4_scaling_beta")
        self._growth_step: int | None = parameters.get("original_max_position_embeddings")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        slot_cache: LatentCache,
        position_ids: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor | None, ...]:
        """Return the output [row, token, hidden], and what transformers' layers expect behind it.

        `position_embeddings` are the model's, if it has any.
        """
        rows, tokens = hidden_states.shape[:2]
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states)) if self._has_query_rank else hidden_states
        query = self.q_b_proj(residual) if self._has_query_rank else self.q_proj(hidden_states)
        query = query.view(rows, tokens, self._num_heads, -1).transpose(1, 2)
        query, rotary_query = torch.split(query, [self._key_width, self._rope_width], dim=-1)
        latent, rotary_key = torch.split(
            self.kv_a_proj_with_mqa(hidden_states)[:, None], [self._rank, self._rope_width], dim=-1
        )
        rotary_query, rotary_key = self._rotate(rotary_query, rotary_key, position_embeddings)
        if self._growth is not None:  # Mistral 4: queries of late positions are larger
            assert position_ids is not None
            steps = torch.floor(position_ids / self._growth_step)  # type: ignore[operator]
            growth = (1 + self._growth * torch.log(1 + steps))[:, None, :, None].to(query.dtype)
            query, rotary_query = query * growth, rotary_query * growth
        stored = [self.kv_a_layernorm(latent), rotary_key]
        options = AttentionOptions(self._scaling)
        if self._indexer is None:
            held = slot_cache.store(self.layer_idx, torch.cat(stored, dim=-1))
        else:
            index_query, index_key = self._indexer.project(hidden_states, residual, position_embeddings)
            stored.append(index_key.transpose(1, 2))
            held = slot_cache.store(self.layer_idx, torch.cat(stored, dim=-1))
            held, index_keys = held.tensor_split([self._rank + self._rope_width], dim=-1)
            if held.shape[2] > self._indexer.num_chosen:
                ranks = self._indexer.ranks(hidden_states, index_query, index_keys)
                options = AttentionOptions(self._scaling, ranks=ranks, num_best=self._indexer.num_chosen)
        attend = self._attend_absorbed if self.absorbs(tokens) else self._attend_expanded
        attended = attend(query, rotary_query, held, partial(slot_cache.attend, self.layer_idx), options)
        return self.o_proj(attended.flatten(2)), None, *self._choice

    def absorbs(self, num_queries: int) -> bool:
        """Return whether attention to the latents needs fewer multiplications than expanded keys and values.

        Absorbed products are longer for each query. Expansion costs once for each head and entry.
        """
        width = self._key_width + self._value_width
        return num_queries * (2 * self._rank - width) <= self._rank * width

    def _attend_absorbed(
        self, query: Tensor, rotary_query: Tensor, held: Tensor, attend: _Attend, options: AttentionOptions
    ) -> Tensor:
        """Attend to the latents; return [row, token, head, value width]."""
        # Products are associative: (query · to_key) · latent equals query · (to_key · latent), the score with
        # the expanded key. The value matrix is applied to the weighted sum of the latents likewise.
        weight = self.kv_b_proj.weight.view(self._num_heads, -1, self._rank)
        to_key, to_value = torch.split(weight, [self._key_width, self._value_width], dim=1)
        absorbed = torch.cat([_by_head("rhtk,hkl->rhtl", query, to_key), rotary_query], dim=-1)
        mixed = attend(absorbed, held, held[..., : self._rank], options)
        return _by_head("rthl,hvl->rthv", mixed, to_value)

    def _attend_expanded(
        self, query: Tensor, rotary_query: Tensor, held: Tensor, attend: _Attend, options: AttentionOptions
    ) -> Tensor:
        """Attend to expanded keys and values; return [row, token, head, value width]."""
        latent, rotary_key = torch.split(held[:, 0], [self._rank, self._rope_width], dim=-1)
        expanded = plain_linear(latent, self.kv_b_proj.weight)
        heads = expanded.view(*latent.shape[:2], self._num_heads, -1).transpose(1, 2)
        key, value = torch.split(heads, [self._key_width, self._value_width], dim=-1)
        key = torch.cat([key, rotary_key[:, None].expand(-1, self._num_heads, -1, -1)], dim=-1)
        return attend(torch.cat([query, rotary_query], dim=-1), key, value, options)


def _by_head(equation: str, rows: Tensor, weight: Tensor) -> Tensor:
    """Return each head's product, in float32 where a processor has no products in bfloat16."""
    if onednn.is_slow(rows):
        return torch.einsum(equation, rows.float(), weight.float()).to(rows.dtype)
    return torch.einsum(equation, rows, weight)


def replace_latent_attention(model: PreTrainedModel) -> None:
    """Replace the attention of every layer, where it is one of `_ATTENTIONS`."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if type(part).__name__ in _ATTENTIONS.values():
                setattr(module, name, LatentAttention(part))


def _rotation(attention: Any) -> _Rotation:
    """Return the function that rotates queries and keys by the output of the model's rotary embedding."""
    if type(attention).__name__ == _ATTENTIONS["kimi_linear"]:
        return lambda query, key, _: (query, key)  # its other layers know the order of tokens
    code: Any = sys.modules[type(attention).__module__]
    if type(attention).__name__ == _ATTENTIONS["deepseek_v2"]:
        rotate_pairs: _Rotation = code.apply_rotary_emb
        return rotate_pairs
    is_interleaved = hasattr(attention, "indexer") or getattr(attention.config, "rope_interleave", False)
    rotate = code.apply_rotary_pos_emb_interleave if is_interleaved else code.apply_rotary_pos_emb
    return lambda query, key, angles: rotate(query, key, *angles)

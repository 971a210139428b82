"""Attention over slots and scratches, and the one joint at which transformers' models call it.

Models pass the cache of `forward.cache` to this function as the keyword argument `slot_cache`. The cache decides what a step reads, which
entries each query may see and whose attention is recorded.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "snapserve_slots"

# The bias of an entry that a query may not see: finite, also when rounded, so that a row which sees nothing is too.
MASKED = torch.finfo(torch.bfloat16).min

# Scores held at once. On the CPU, blocks that stay in a core's cache are the fastest, but for the products not fewer than 64 queries: of
# 512 queries and 2,048 to 8,192 keys, blocks of 16 were 1.4 to 1.6 times as slow. A GPU wants few and large ones.
_MAX_SCORES_CPU = 1 << 20
_MAX_SCORES_GPU = 1 << 26
_FEWEST_QUERIES = 64


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model asks of one layer's attention."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [head]: a score that takes part in the softmax and has no value
    sliding_window: int | None = None  # how many tokens a query sees, its own among them; None: all


class AttentionCache(Protocol):
    """What the registered function calls."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention's output [row, query, head, width]; `query`, `key` and `value` are [row, head, token, width].

        What `update` returned for the layer comes back as `key` and `value`; a cache that knows the layer's window ignores the one given.
        """
        ...


def register_attention() -> None:
    """Make the attention function known to transformers. No mask function goes with it, so the models build no masks of their own."""
    AttentionInterface.register(ATTENTION_NAME, _slot_attention)


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001
    *,
    slot_cache: AttentionCache,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if position_bias is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError("attention that is not causal, or has a learned bias of its own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = slot_cache.attend(
        layer, query, key, value, AttentionOptions(scaling, softcap, s_aux, sliding_window)
    )
    return output.contiguous(), None  # some models take a view of it


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(query · key · scaling + bias) · value as [row, query, head, width].

    `query` is [row, head, query, width], `key` and `value` are [row, kv_head, entry, width] and `sinks` [head]: a score that takes part in
    the softmax and has no value. `bias` is float32 [row, query, the last entries]; the entries before them are seen by every query. Long
    queries are taken in blocks, which bounds the memory. `is_causal` promises that no query sees an entry further from the end than the
    query is from the last one, so that blocks need not look there.
    """
    rows, heads, length, _ = query.shape
    entries = key.shape[2]
    num_open = entries - bias.shape[2]
    if key.device.type == "cpu" and key.dtype is not torch.float32:
        # oneDNN's products would transpose a strided view entry by entry; in float32, MKL reads it where it lies.
        key, value = key.contiguous(), value.contiguous()
    limit = _MAX_SCORES_CPU if query.device.type == "cpu" else _MAX_SCORES_GPU
    block = max(limit // (rows * heads * entries), _FEWEST_QUERIES)
    outputs = []
    for first in range(0, length, block):
        last = min(first + block, length)
        reach = max(entries - (length - last), num_open + 1) if is_causal else entries
        seen = bias[:, first:last, : reach - num_open]
        outputs.append(
            _attend_block(
                query[:, :, first:last], key[:, :, :reach], value[:, :, :reach], seen, scaling, softcap, sinks
            )
        )
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The query heads of a KV head are folded into the query axis: two plain products, and no key is repeated.

    The scores stay in the products' own dtype, whose softmax computes in float32 inside: half the bytes of a float32 copy.
    """
    rows, heads, length, width = query.shape
    kv_heads, entries = key.shape[1], key.shape[2]
    folded = query.reshape(rows * kv_heads, -1, width)
    scores = torch.baddbmm(
        query.new_empty(1, 1, 1), folded, key.flatten(0, 1).transpose(1, 2), beta=0, alpha=scaling
    )
    if softcap is not None or scores.dtype is torch.float16:  # float16 has no room for the bias
        scores = scores.float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(rows, kv_heads, -1, length, entries)
    scores[..., entries - bias.shape[2] :] += bias[:, None, None]
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    mixed = torch.bmm(weights.to(value.dtype).reshape(rows * kv_heads, -1, entries), value.flatten(0, 1))
    return mixed.view(rows, heads, length, -1)

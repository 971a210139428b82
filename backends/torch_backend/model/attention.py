"""Attention over slots and scratches, and the attention function that transformers' models call.

Models pass the cache of `forward.cache` to this function as the keyword argument `slot_cache`. The cache
decides which entries a step reads, which of them each query sees, and whose attention is recorded.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "snapserve_slots"

# The bias of a masked entry. It is finite, also when rounded, so the output of a fully masked row is finite
# too.
MASKED = torch.finfo(torch.bfloat16).min

# Scores of one block. On the CPU, blocks that fit a core's cache are the fastest, but the products need at
# least 64 queries: for 512 queries and 2,048 to 8,192 keys, blocks of 16 took 1.4 to 1.6 times as long. A GPU
# needs large blocks.
_MAX_SCORES_CPU = 1 << 20
_MAX_SCORES_GPU = 1 << 26
_FEWEST_QUERIES = 64


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The parameters of one layer's attention."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [head]: a score that takes part in the softmax and has no value
    sliding_window: int | None = None  # tokens that a query sees, its own included; None: all
    # float32 [row, query, entry]: each query attends to the `num_best` entries alone that it sees and for
    # which this is the highest. None: to all.
    ranks: Tensor | None = None
    num_best: int = 0


class AttentionCache(Protocol):
    """The cache that the registered function calls."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the output [row, query, head, width]. `query`, `key`, `value` are [row, head, token, width].

        `key` and `value` are what `update` returned for the layer. A cache that knows the layer's window
        ignores the one in `options`.
        """
        ...


def register_attention() -> None:
    """Register the attention function with transformers.

    Models build no masks, as it has no mask function.
    """
    AttentionInterface.register(ATTENTION_NAME, _slot_attention)


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_cache: AttentionCache | None = None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if slot_cache is None:
        raise NotImplementedError("its layers do not pass on what attention needs")
    if position_bias is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError("attention that is not causal or has a learned bias")
    if attention_mask is not None:  # transformers' masks are not built: this is a layer's own
        raise NotImplementedError("attention with a mask that a layer computes")
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

    `query` is [row, head, query, width], and `key` and `value` are [row, kv_head, entry, width]. `sinks`
    [head] are scores in the softmax without a value. `bias` is float32 [row, query, the last entries]; every
    query sees all entries before them. Queries are processed in blocks, which limits the memory. With
    `is_causal`, the query i places before the last one sees no entry of the last i, and blocks skip those
    entries.
    """
    rows, heads, length, _ = query.shape
    entries = key.shape[2]
    num_open = entries - bias.shape[2]
    if key.device.type == "cpu" and key.dtype is not torch.float32:
        # oneDNN would transpose a strided view entry by entry. In float32, MKL reads the view directly.
        key = key.contiguous()
        value = value.contiguous()
    limit = _MAX_SCORES_CPU if query.device.type == "cpu" else _MAX_SCORES_GPU
    block = max(limit // (rows * heads * entries), _FEWEST_QUERIES)
    outputs = []
    for first in range(0, length, block):
        last = min(first + block, length)
        # A block sees no entry that belongs to a later block. The lower bound keeps the bias's slice from a
        # negative stop, which would count from its other end.
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
    """Return the output [row, head, query, width] of one block of queries.

    The query heads of a KV head are folded into the query axis: two plain products, and no key is repeated.
    The scores keep the products' dtype, since its softmax computes in float32 internally. That halves the
    bytes.
    """
    rows, heads, length, width = query.shape
    kv_heads, entries = key.shape[1], key.shape[2]
    folded = query.reshape(rows * kv_heads, -1, width)
    # With beta 0 the first argument is ignored. Unlike bmm, baddbmm scales without another pass.
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

"""Attention of a decode step over a slot's exact entries and over the best tokens of its store.

As YAKV (arXiv 2604.08426): every stored token's own key scores it, and no group of tokens shares one.
Unlike there, the keys that score are those that are attended to, in 4 bits. Exact entries and chosen tokens
share one softmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.torch_backend.model import fused_attention
from backends.torch_backend.model.attention import MASKED, AttentionOptions
from cache.low_bits import rotate
from cache.token_store import TokenStore


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The first `num_stored` [row] tokens in each row's store; `num_attended` of them are attended to."""

    store: TokenStore
    slots: slice
    num_stored: Tensor
    num_attended: int


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, stored: StoredTokens, options: AttentionOptions
) -> Tensor:
    """Return the output [row, 1, head, width] of one query a row, in its type.

    `query` is [row, head, 1, width]. `key` and `value` are the exact entries, [row, kv_head, entry, width],
    with their `bias` [row, 1, entry]; values of latents are the first numbers of their keys. Shapes do not
    depend on how many tokens are stored: fewer than `num_attended` are all attended to, and entries without a
    token are masked.
    """
    rows, heads, _, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().view(rows, kv_heads, heads // kv_heads, width)
    exact = _scores(grouped, key.float(), options) + bias[:, None]
    rotated = rotate(grouped)
    scores = _stored_scores(rotated, stored, options)  # [row, kv_head, group, token]
    token = torch.arange(scores.shape[3], device=scores.device)
    is_stored = token < stored.num_stored[:, None]
    scores = torch.where(is_stored[:, None, None], scores, MASKED)
    chosen = strengths(scores).topk(stored.num_attended, dim=-1, sorted=False).indices
    scores = scores.gather(3, chosen[:, :, None].expand(-1, -1, scores.shape[2], -1))
    parts = [exact, scores]
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, -1, 1)
        parts.append(sinks.expand(rows, -1, -1, -1))
    weights = torch.cat(parts, dim=-1).softmax(dim=-1)
    num_exact = exact.shape[3]
    mixed = weights[..., :num_exact] @ value.float()
    weights = weights[..., num_exact : num_exact + stored.num_attended]
    mixed = mixed + rotate(weights @ stored.store.values(stored.slots, chosen))[..., : value.shape[3]]
    return mixed.view(rows, 1, heads, -1).to(query.dtype)


def strengths(scores: Tensor) -> Tensor:
    """Return by what stored tokens are chosen, [row, kv_head, token].

    `scores` are [row, kv_head, group, token]. What counts is the largest share of attention among the stored
    tokens that any query head of the group pays.
    """
    return scores.log_softmax(dim=-1).amax(dim=2)


def _stored_scores(rotated: Tensor, stored: StoredTokens, options: AttentionOptions) -> Tensor:
    """As `_scores`, of all tokens of the store, with or without a stored one, for rotated queries."""
    if not fused_attention.fits_store(rotated, stored.store):
        return _scores(rotated, stored.store.keys(stored.slots), options)
    products = fused_attention.stored_scores(rotated, stored.store, stored.slots, stored.num_stored)
    return _scaled(products, options)


def _scores(query: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Return the scores [row, kv_head, group, token] of queries [row, kv_head, group, width]."""
    return _scaled(query @ keys.transpose(2, 3), options)


def _scaled(products: Tensor, options: AttentionOptions) -> Tensor:
    scores = products * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores

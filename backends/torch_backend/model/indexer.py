"""The indexer of DeepSeek sparse attention (DeepSeek-V3.2, "lightning indexer").

Each token has one more small key. The weighted products of a token's index queries with the keys of all
entries rank the entries, and its attention takes part in the best of them alone. The keys lie behind the
latents, in the same plane. transformers computes the same without the Hadamard rotation, which changes no
product, and without the rounding to fp8 of DeepSeek's own code.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

# Products of index queries and keys, in float32, that are held at once. A GPU needs large blocks.
_MAX_PRODUCTS_CPU = 1 << 24
_MAX_PRODUCTS_GPU = 1 << 26


class Indexer:
    """The queries, keys and ranks of one attention that has the part `indexer` of transformers' code."""

    def __init__(self, origin: Any) -> None:
        code: Any = sys.modules[type(origin).__module__]
        is_halved = type(origin).__name__ == "DeepseekV32Attention"  # else pairs are rotated
        self._rotate = code.apply_rotary_pos_emb if is_halved else code.apply_rotary_pos_emb_interleave
        self._parts = origin.indexer
        self._rope_width: int = self._parts.qk_rope_head_dim
        self._num_heads: int = self._parts.n_heads
        self.num_chosen: int = self._parts.index_topk

    def project(self, hidden: Tensor, residual: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
        """Return the index queries [row, token, head, width] and keys [row, token, 1, width].

        `hidden` [row, token, hidden] are the layer's inputs, and `residual` the latents of their queries.
        """
        query = self._parts.wq_b(residual).unflatten(-1, (self._num_heads, -1))
        key = self._parts.k_norm(self._parts.wk(hidden)).unsqueeze(2)
        widths = [self._rope_width, query.shape[-1] - self._rope_width]
        rotary_query, rest_of_query = torch.split(query, widths, dim=-1)
        rotary_key, rest_of_key = torch.split(key, widths, dim=-1)
        rotary_query, rotary_key = self._rotate(rotary_query, rotary_key, *angles, unsqueeze_dim=2)
        return torch.cat([rotary_query, rest_of_query], dim=-1), torch.cat([rotary_key, rest_of_key], dim=-1)

    def ranks(self, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return how much each query wants each entry, float32 [row, query, entry].

        `hidden` and `query` are those of `project`, `key` [row, 1, entry, width] those of all entries.
        """
        projection = self._parts.weights_proj
        if isinstance(projection, nn.Linear):
            hidden = hidden.to(projection.weight.dtype)  # float32 in a model in float16
        weights = projection(hidden).float() * (self._num_heads * query.shape[-1]) ** -0.5
        limit = _MAX_PRODUCTS_CPU if key.device.type == "cpu" else _MAX_PRODUCTS_GPU
        products = self._num_heads * key.shape[2]  # of a query
        num_rows = max(limit // products, 1)
        num_queries = max(limit // (min(num_rows, len(key)) * products), 1)
        split = [torch.split(each, num_rows) for each in (query, weights, key)]
        return torch.cat([_ranks(*rows, num_queries=num_queries) for rows in zip(*split, strict=True)])


def _ranks(query: Tensor, weights: Tensor, key: Tensor, *, num_queries: int) -> Tensor:
    """Rank the entries of some rows, for `num_queries` of their queries at a time."""
    keys = key[:, 0].float()
    ranks = [
        torch.einsum("rqhe,rqh->rqe", torch.einsum("rqhw,rew->rqhe", some.float(), keys).relu(), heads)
        for some, heads in zip(
            torch.split(query, num_queries, 1), torch.split(weights, num_queries, 1), strict=True
        )
    ]
    return torch.cat(ranks, dim=1)

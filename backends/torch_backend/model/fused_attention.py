"""Attention on a CUDA device by kernels that keep no scores in memory: torch's for prompts, ours for decode.

Both need what most models have. For the others, `attention.grouped_attention` serves: it multiplies, adds the
mask, takes the softmax and multiplies again. A third kernel scores the keys of a store.
"""

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_backend.model.attention import AttentionOptions
from cache.token_store import TokenStore

logger = logging.getLogger(__name__)

# Beyond these, tiles of queries, keys and values do not fit a multiprocessor's shared memory.
_MOST_WIDTH = 256
_MOST_QUERIES = 64  # query heads of one KV head
_MOST_STORE_QUERIES = 128  # the same, of a kernel that has no values


def fits_prompt(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Return whether `prompt_attention` serves a prompt's chunk.

    All are [row, head, token, width], and the last query sees the last entry. A query of padding must not
    precede the first entry.
    """
    return (
        query.is_cuda
        and query.dtype is not torch.float32
        and query.shape[0] == 1
        and query.shape[2] <= key.shape[2]
        and query.shape[3] == value.shape[3] <= _MOST_WIDTH
        and options.softcap is None
        and options.sinks is None
    )


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Return the output [row, query, head, width] of queries that each see one entry more than the last."""
    from torch.nn.attention.bias import causal_lower_right  # takes a second to import

    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(query.shape[2], key.shape[2]),
        scale=options.scaling,
        enable_gqa=True,
    )
    return output.transpose(1, 2)


def fits_decode(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> bool:
    """Return whether `decode_attention` serves a step of one token a row."""
    return (
        query.is_cuda
        and query.shape[2] == 1
        and bias.shape[2] == key.shape[2]
        and query.shape[1] <= _MOST_QUERIES * key.shape[1]
        and max(query.shape[3], value.shape[3]) <= _MOST_WIDTH
        and key.stride(3) == value.stride(3) == query.stride(3) == 1
        and _kernels() is not None
    )


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the output [row, query, head, width] of a step that `fits_decode`."""
    kernels = _kernels()
    assert kernels is not None, "the step fits"
    output: Tensor = kernels.decode_attention(
        query, key, value, bias, scaling=options.scaling, softcap=options.softcap, sinks=options.sinks
    )
    return output


def fits_store(query: Tensor, store: TokenStore) -> bool:
    """Return whether `stored_scores` serves queries [row, kv_head, group, width]."""
    _, steps = store.key_planes
    return (
        query.is_cuda
        and query.shape[2] <= _MOST_STORE_QUERIES
        and query.shape[3] // steps.shape[3] in (32, 64)
        and _has_store_kernel()
    )


def stored_scores(query: Tensor, store: TokenStore, slots: slice, num_stored: Tensor) -> Tensor:
    """Return query · key of the store's keys for queries that `fits_store`, [row, kv_head, group, token].

    The queries are rotated, in float32. Only the scores of the first `num_stored` [row] tokens count.
    """
    kernels = _kernels()
    assert kernels is not None, "the queries fit"
    codes, steps = store.key_planes
    scores: Tensor = kernels.stored_scores(query, codes[slots], steps[slots], num_stored, store.num_tokens)
    return scores.add_(query @ store.centres[slots][..., None])


@cache
def _kernels() -> ModuleType | None:
    """Return the kernels; None, after a warning, where Triton cannot build them: it needs a C compiler."""
    try:
        from backends.torch_backend.native import cuda_kernels

        tensor = torch.zeros(1, 1, 1, 16, device="cuda")
        cuda_kernels.decode_attention(tensor, tensor, tensor, tensor[:, 0, :, :1], scaling=1.0)
    except Exception as error:
        logger.warning("decode's attention runs without its kernel, and slower: Triton fails: %s", error)
        return None
    return cuda_kernels


@cache
def _has_store_kernel() -> bool:
    """Return whether Triton can build `stored_scores`; warn where it cannot."""
    kernels = _kernels()
    if kernels is None:
        return False
    try:
        planes = TokenStore(1, 1, 1, (64,), "cuda").key_planes
        num_stored = torch.ones(1, dtype=torch.int64, device="cuda")
        kernels.stored_scores(torch.zeros(1, 1, 1, 64, device="cuda"), *planes, num_stored, 1)
    except Exception as error:
        logger.warning("keys in 4 bits are unpacked to be scored, which is slower: Triton fails: %s", error)
        return False
    return True

"""Decode's attention on a CUDA device, as Triton kernels: each entry is read once, and few sequences fill it.

The entries of a slot are divided into parts of fixed length, which are attended to side by side, and then
joined. A sequence's output therefore does not depend on the other sequences of its batch. Parts without a
live entry are not read. (The running softmax is that of FlashAttention, arXiv 2205.14135; the parts are those
of Flash-Decoding.) Keys of a store are scored as they are, in 4 bits.

Importing this needs triton, which comes with PyTorch's builds for CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache.token_store import BLOCK, STORED_TOGETHER

_PART = 512  # entries
_FEWEST_ROWS = 16  # of a product on the matrix units
_STORED_TILE = 64  # stored tokens that one program scores
_LEAST_LIVE = tl.constexpr(-1e38)  # a larger bias is one of a live entry


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    bias,
    outputs,
    maxima,
    sums,
    num_kv_heads,
    num_entries,
    scaling,
    softcap,
    query_row,
    query_head,
    key_row,
    key_head,
    key_entry,
    value_row,
    value_head,
    value_entry,
    bias_row,
    group: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    padded_group: tl.constexpr,
    padded_key: tl.constexpr,
    padded_value: tl.constexpr,
    part: tl.constexpr,
    block: tl.constexpr,
    has_softcap: tl.constexpr,
):
    """Attend to one part of the entries, with the query heads of one KV head of one row.

    Writes the part's output, which its sum of weights does not divide yet, that sum, and its largest score.
    """
    row = tl.program_id(0) // num_kv_heads
    head = tl.program_id(0) % num_kv_heads
    first = tl.program_id(1) * part
    heads = tl.arange(0, padded_group)
    key_columns = tl.arange(0, padded_key)
    value_columns = tl.arange(0, padded_value)
    is_head = heads < group
    part_entries = first + tl.arange(0, part)
    biases = tl.load(
        bias + row * bias_row + part_entries, mask=part_entries < num_entries, other=-float("inf")
    )
    largest = tl.full([padded_group], -float("inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    output = tl.zeros([padded_group, padded_value], tl.float32)
    if tl.max(biases, 0) > _LEAST_LIVE:
        queries = tl.load(
            query
            + row.to(tl.int64) * query_row
            + (head * group + heads)[:, None] * query_head
            + key_columns[None, :],
            mask=is_head[:, None] & (key_columns < key_width)[None, :],
            other=0.0,
        )
        keys = key + row.to(tl.int64) * key_row + head * key_head
        values = value + row.to(tl.int64) * value_row + head * value_head
        for start in range(0, part, block):
            entries = first + start + tl.arange(0, block)
            is_entry = entries < num_entries
            loaded_keys = tl.load(
                keys + entries[None, :].to(tl.int64) * key_entry + key_columns[:, None],
                mask=is_entry[None, :] & (key_columns < key_width)[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, loaded_keys, input_precision="ieee") * scaling
            if has_softcap:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            entry_bias = tl.load(bias + row * bias_row + entries, mask=is_entry, other=-float("inf"))
            scores += entry_bias[None, :]
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - new_largest[:, None])
            shrink = tl.exp(largest - new_largest)
            loaded_values = tl.load(
                values + entries[:, None].to(tl.int64) * value_entry + value_columns[None, :],
                mask=is_entry[:, None] & (value_columns < value_width)[None, :],
                other=0.0,
            )
            output = output * shrink[:, None] + tl.dot(
                weights.to(loaded_values.dtype), loaded_values, input_precision="ieee"
            )
            total = total * shrink + tl.sum(weights, 1)
            largest = new_largest
    num_parts = tl.num_programs(1)
    place = ((row * num_kv_heads + head) * group + heads) * num_parts + tl.program_id(1)
    tl.store(maxima + place, largest, mask=is_head)
    tl.store(sums + place, total, mask=is_head)
    tl.store(
        outputs + place[:, None].to(tl.int64) * value_width + value_columns[None, :],
        output,
        mask=is_head[:, None] & (value_columns < value_width)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    outputs,
    maxima,
    sums,
    sinks,
    joined,
    num_heads,
    num_parts,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    padded_parts: tl.constexpr,
    block: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Join the parts of one head of one row: their outputs weighted by exp(largest score), over all sums.

    A row without a live entry gets zeros.
    """
    place = tl.program_id(0)
    all_parts = tl.arange(0, padded_parts)
    part_maxima = tl.load(
        maxima + place * num_parts + all_parts, mask=all_parts < num_parts, other=-float("inf")
    )
    largest = tl.max(part_maxima, 0)
    total = 0.0
    if has_sinks:
        sink = tl.load(sinks + place % num_heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
        total = tl.exp(sink - largest)
    columns = tl.arange(0, padded_width)
    output = tl.zeros([padded_width], tl.float32)
    for first in range(0, num_parts, block):
        parts = first + tl.arange(0, block)
        is_part = parts < num_parts
        maximum = tl.load(maxima + place * num_parts + parts, mask=is_part, other=-float("inf"))
        weights = tl.where(maximum == -float("inf"), 0.0, tl.exp(maximum - largest))
        total += tl.sum(weights * tl.load(sums + place * num_parts + parts, mask=is_part, other=0.0), 0)
        part_outputs = tl.load(
            outputs + (place * num_parts + parts)[:, None].to(tl.int64) * width + columns[None, :],
            mask=is_part[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        output += tl.sum(weights[:, None] * part_outputs, 0)
    output = output / tl.maximum(total, 1e-30)
    tl.store(joined + place * width + columns, output.to(joined.dtype.element_ty), mask=columns < width)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(query · key · scaling + bias) · value as [row, 1, head, width].

    `query` is [row, head, 1, width], `key` and `value` [row, kv_head, entry, width], and `bias` float32
    [row, 1, entry]. `sinks` [head] are scores in the softmax without a value.
    """
    rows, heads, _, width = query.shape
    kv_heads, entries, value_width = value.shape[1:]
    group = heads // kv_heads
    num_parts = triton.cdiv(entries, _PART)
    outputs = query.new_empty(rows, heads, num_parts, value_width, dtype=torch.float32)
    maxima = query.new_empty(rows, heads, num_parts, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    widest = max(triton.next_power_of_2(width), triton.next_power_of_2(value_width), 16)
    _attend_part[(rows * kv_heads, num_parts)](
        query,
        key,
        value,
        bias,
        outputs,
        maxima,
        sums,
        kv_heads,
        entries,
        scaling,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        *key.stride()[:3],
        *value.stride()[:3],
        bias.stride(0),
        group=group,
        key_width=width,
        value_width=value_width,
        padded_group=max(triton.next_power_of_2(group), _FEWEST_ROWS),
        padded_key=max(triton.next_power_of_2(width), 16),
        padded_value=max(triton.next_power_of_2(value_width), 16),
        part=_PART,
        block=64 if widest * query.element_size() <= 256 else 32,
        has_softcap=softcap is not None,
        num_warps=4,
        num_stages=3,
    )
    joined = query.new_empty(rows, 1, heads, value_width)
    _join_parts[(rows * heads,)](
        outputs,
        maxima,
        sums,
        maxima if sinks is None else sinks,
        joined,
        heads,
        num_parts,
        width=value_width,
        padded_width=max(triton.next_power_of_2(value_width), 16),
        padded_parts=triton.next_power_of_2(num_parts),
        block=32,
        has_sinks=sinks is not None,
        num_warps=4,
    )
    return joined


@triton.jit  # type: ignore[untyped-decorator]
def _score_stored(  # type: ignore[no-untyped-def]
    query,
    codes,
    steps,
    num_stored,
    scores,
    num_kv_heads,
    num_tokens,
    codes_slot,
    codes_head,
    codes_block,
    steps_slot,
    steps_head,
    steps_block,
    group: tl.constexpr,
    width: tl.constexpr,
    part: tl.constexpr,
    padded_group: tl.constexpr,
    tile: tl.constexpr,
    block_size: tl.constexpr,
    together: tl.constexpr,
):
    """Score a tile of one row's stored keys with the query heads of one KV head.

    A tile without a stored token is not read, and its scores are not written.
    """
    row = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    first = tl.program_id(1) * tile
    if first < tl.load(num_stored + row):
        heads = tl.arange(0, padded_group)
        is_head = (heads < group)[:, None]
        tokens = first + tl.arange(0, tile)
        block, place = (tokens // block_size).to(tl.int64), tokens % block_size
        is_token = (tokens < num_tokens)[None, :]
        # A byte has one number in its low half, and the one four places behind it in the other.
        half: tl.constexpr = together // 2
        byte = tl.arange(0, part // 2)
        eight, offset = byte // half, byte % half
        queries = query + ((row * num_kv_heads + head) * group + heads)[:, None] * width
        total = tl.zeros([padded_group, tile], tl.float32)
        for start in range(0, width, part):
            columns = (start + eight * together + offset)[None, :]
            low_queries = tl.load(queries + columns, mask=is_head, other=0.0)
            high_queries = tl.load(queries + columns + half, mask=is_head, other=0.0)
            packed = tl.load(
                codes
                + row * codes_slot
                + head * codes_head
                + block[None, :] * codes_block
                + ((start // together + eight)[:, None] * block_size + place[None, :]) * half
                + offset[:, None],
                mask=is_token,
                other=0,
            )
            low = (packed & 15).to(tl.float32) - 7.5
            high = (packed >> 4).to(tl.float32) - 7.5
            products = tl.dot(low_queries, low, input_precision="tf32x3")
            products += tl.dot(high_queries, high, input_precision="tf32x3")
            step = tl.load(
                steps
                + row * steps_slot
                + head * steps_head
                + block * steps_block
                + start // part * block_size
                + place,
                mask=tokens < num_tokens,
                other=0.0,
            )
            total += products * step.to(tl.float32)[None, :]
        target = ((row * num_kv_heads + head) * group + heads)[:, None] * num_tokens + tokens[None, :]
        tl.store(scores + target, total, mask=is_head & is_token)


def stored_scores(query: Tensor, codes: Tensor, steps: Tensor, num_stored: Tensor, num_tokens: int) -> Tensor:
    """Return query · key of stored keys less their centre, float32 [row, kv_head, group, token].

    `query` is float32 [row, kv_head, group, width] and rotated. `codes` and `steps` are the planes of keys in
    a `TokenStore`, of as many slots; parts have 32 or 64 numbers. Scores behind the first `num_stored` [row]
    tokens have any value.
    """
    rows, kv_heads, group, width = query.shape
    scores = query.new_empty(rows, kv_heads, group, num_tokens)
    _score_stored[(rows * kv_heads, triton.cdiv(num_tokens, _STORED_TILE))](
        query.contiguous(),
        codes,
        steps,
        num_stored,
        scores,
        kv_heads,
        num_tokens,
        *codes.stride()[:3],
        *steps.stride()[:3],
        group=group,
        width=width,
        part=width // steps.shape[3],
        padded_group=max(triton.next_power_of_2(group), _FEWEST_ROWS),
        tile=_STORED_TILE,
        block_size=BLOCK,
        together=STORED_TOGETHER,
        num_warps=4,
    )
    return scores

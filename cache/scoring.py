"""Which tokens of a long prompt are kept: those that the prompt's last queries attend to most.

(SnapKV, arXiv 2404.14469, and SnapStream, arXiv 2511.03092, section 2.4 and equation 3.)

There are two steps, because the observation window may straddle two chunks of a chunked prefill: `join_votes`
accumulates the `window_votes` of each chunk, and `select` chooses once. The candidates are the tokens in
[num_sink, candidates_end). Slots and models are not known here.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer


class Window(NamedTuple):
    """Observing queries, and the keys in [first, end) that they vote on.

    A query sees the keys up to `last_seen`, none for −1. Its attention is multiplied by its `strength`.
    """

    query: Tensor  # [head, query, width]
    key: Tensor  # [kv_head, key, width]
    last_seen: Tensor  # [query]
    strength: Tensor  # [query]
    first: Tensor | int
    end: Tensor | int
    scale: float
    softcap: float | None
    is_sum: bool  # a key's vote is the sum of the queries' attention, not the largest


# `reduced_attention`, or a faster function with the same result.
Reduction = Callable[[Window], Tensor]


def reduced_attention(window: Window) -> Tensor:
    """Return the queries' attention to each key, its sum or its largest: float32 [head, key]."""
    logits = _grouped_logits(window.query, window.key) * window.scale  # [kv_head, group, query, key]
    if window.softcap is not None:
        logits = window.softcap * torch.tanh(logits / window.softcap)
    key_index = torch.arange(window.key.shape[1], device=window.key.device)
    is_candidate = (key_index >= window.first) & (key_index < window.end)
    is_seen = (key_index <= window.last_seen[:, None]) & is_candidate  # [query, key]
    weights = logits.masked_fill(~is_seen, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~is_seen, 0)  # the softmax of a query that sees nothing is NaN
    weights = weights * window.strength[:, None]
    return (weights.sum(-2) if window.is_sum else weights.amax(-2)).flatten(0, 1)


def window_votes(
    scorer: WindowScorer,
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    *,
    scale: float,
    num_sink: int,
    candidates_end: Tensor | int,
    num_prompt_tokens: Tensor | int,
    softcap: float | None = None,
    num_observing: int | None = None,
    num_echoed: int = 0,
    echo_weight: float = 1.0,
    reduction: Reduction = reduced_attention,
) -> Tensor:
    """Return the votes of one chunk's observing queries on each key: float32 [head, key].

    `query` is [head, query, width] and `key` [kv_head, key, width], with rotary positions applied. `key[:,
    i]` is the key of the token at index i. `query_index` [query] has the index of each query's token,
    negative for padding. Only queries of the last `num_observing` tokens vote; None: of the scorer's
    observation window. The first `num_echoed` of them are an echo of the question, whose votes count
    `echo_weight` at any distance. Keys that no query sees get no vote, and may be NaN. Shapes are static; the
    two lengths may be 0-d tensors, so that one graph serves every prompt.
    """
    size = num_observing or scorer.observation_window
    is_read = (query_index >= 0) & (query_index < num_prompt_tokens)
    observes = is_read & (query_index >= num_prompt_tokens - size)
    # In most chunks nearly no query observes. The others are dropped before the product with the keys: of a
    # static shape, the chunk keeps as many queries as the window has, the observing ones first.
    index, rows = torch.where(observes, query_index, -1).topk(min(size, query_index.shape[0]))
    distance = (num_prompt_tokens - 1 - index).clamp(max=size)  # larger for padding, whose votes are zeros
    strength = torch.exp2(-distance / (scorer.observation_half_life or math.inf)).clamp(min=scorer.least_vote)
    if num_echoed:
        strength = torch.where(distance >= size - num_echoed, echo_weight, strength)
    over_candidates = scorer.softmax_domain is SoftmaxDomain.CANDIDATES
    window = Window(
        query[:, rows],
        key,
        last_seen=index,
        strength=strength,
        first=num_sink if over_candidates else 0,
        end=candidates_end if over_candidates else key.shape[1],
        scale=scale,
        softcap=softcap,
        is_sum=scorer.query_reduction is QueryReduction.SUM,
    )
    return reduction(window)


def join_votes(scorer: WindowScorer, votes: Tensor, more: Tensor) -> None:
    """Add the votes `more` of another chunk's queries to `votes` [head, key], in place; 0 is no vote."""
    if scorer.query_reduction is QueryReduction.SUM:
        votes += more
    else:
        torch.maximum(votes, more, out=votes)


def _grouped_logits(query: Tensor, key: Tensor) -> Tensor:
    """Return float32 logits [kv_head, group, query, key], each group folded into the query axis: no key is
    repeated.
    """
    num_kv_heads, num_keys, width = key.shape
    num_queries = query.shape[1]
    folded = query.reshape(num_kv_heads, -1, width) @ key.transpose(1, 2)
    return folded.float().view(num_kv_heads, -1, num_queries, num_keys)


def select(
    scorer: WindowScorer,
    votes: Tensor,
    num_kv_heads: int,
    num_sink: int,
    end: int,
    num_kept: int,
    num_lent: int = 0,
    leader_scores: Tensor | None = None,
) -> Tensor:
    """Return the indices of the tokens to keep, ascending, then those of the `num_lent` next best, best last.

    The result is int64 [kv_head, num_kept + num_lent], or [kv_head, end − num_sink] if there are no more
    candidates than that. `votes` is [head, key], joined from all chunks.

    The candidates with the highest `candidate_scores` win, or with the highest `leader_scores` [candidate]
    where these are higher; chunk by chunk if the scorer has chunks. Ties go to the earlier token. The last
    chunk may be kept in part, from its start.
    """
    if end - num_sink <= num_kept:
        return torch.arange(num_sink, end, device=votes.device).repeat(num_kv_heads, 1)
    scores = candidate_scores(scorer, votes, num_kv_heads, num_sink, end)
    if leader_scores is not None:
        scores = torch.maximum(scores, leader_scores)
    if scorer.selection_chunk > 1:
        scores = _chunk_means(scores, scorer.selection_chunk)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : num_kept + num_lent]
    kept = best[:, :num_kept].sort(dim=-1).values
    lent = best[:, num_kept:].flip(-1)
    return num_sink + torch.cat([kept, lent], dim=-1)


def candidate_scores(
    scorer: WindowScorer, votes: Tensor, num_kv_heads: int, num_sink: int, end: int
) -> Tensor:
    """Return votes [head, key] pooled along the candidates and reduced by KV head: [kv_head, candidate]."""
    pooled = _pool(scorer, votes[:, num_sink:end]).view(num_kv_heads, -1, end - num_sink)
    return pooled.mean(1) if scorer.head_reduction is HeadReduction.MEAN else pooled.amax(1)


def _pool(scorer: WindowScorer, votes: Tensor) -> Tensor:
    """Pool along the sequence with stride 1. Nothing beyond the first and the last candidate takes part."""
    size = scorer.pooling_size
    shift = scorer.pooling_shift
    padding = (size // 2 + shift, size // 2 - shift)
    if scorer.pooling_half_life > 0:
        centre = padding[0]
        fades = [2.0 ** (-abs(offset - centre) / scorer.pooling_half_life) for offset in range(size)]
        return _pool_fading(scorer.pooling, votes, padding, fades)
    if scorer.pooling is Pooling.MAXIMUM:
        return functional.max_pool1d(functional.pad(votes, padding, value=-torch.inf)[None], size, stride=1)[
            0
        ]
    # The mean of the candidates in each window: at the borders there are fewer than `size` of them.
    sums, counts = (
        functional.pad(values, padding).unfold(-1, size, 1).sum(-1)
        for values in (votes, torch.ones_like(votes[:1]))
    )
    return sums / counts


def _pool_fading(pooling: Pooling, votes: Tensor, padding: tuple[int, int], fades: Sequence[float]) -> Tensor:
    """Pool votes, of which none is negative, each multiplied by the fade of its offset in the window.

    One offset at a time: an unfolded window would take many times the memory.
    """
    num_candidates = votes.shape[1]

    def faded(values: Tensor) -> Iterator[Tensor]:
        padded = functional.pad(values, padding)
        return (fade * padded[:, offset : offset + num_candidates] for offset, fade in enumerate(fades))

    if pooling is Pooling.MAXIMUM:
        return functools.reduce(torch.maximum, faded(votes))
    sums = functools.reduce(torch.add, faded(votes))
    return sums / functools.reduce(torch.add, faded(torch.ones_like(votes[:1])))


def _chunk_means(scores: Tensor, size: int) -> Tensor:
    """Return the mean score of each token's chunk. The last chunk may be shorter."""
    means = functional.avg_pool1d(scores, size, stride=size, ceil_mode=True)
    return means.repeat_interleave(size, dim=-1)[..., : scores.shape[-1]]

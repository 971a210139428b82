"""Which tokens of a long prompt are kept: those to which the prompt's last queries attend most (SnapKV, arXiv 2404.14469, and SnapStream,
arXiv 2511.03092, section 2.4 and equation 3).

Two steps, because the observation window may straddle two chunks of a chunked prefill: `join_votes` gathers the `window_votes` of every
chunk, and `select` chooses once. The candidates are the tokens in [num_sink, candidates_end). Nothing is known here of slots or models.
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
    """Queries that observe, and the keys in [first, end) on which they vote.

    A query sees the keys up to `last_seen`, none for −1. What it pays to them is multiplied by its `strength`.
    """

    query: Tensor  # [head, query, width]
    key: Tensor  # [kv_head, key, width]
    last_seen: Tensor  # [query]
    strength: Tensor  # [query]
    first: Tensor | int
    end: Tensor | int
    scale: float
    softcap: float | None
    is_sum: bool  # of the queries' attention; else the largest


Reduction = Callable[[Window], Tensor]  # `reduced_attention`, or what does the same faster


def reduced_attention(window: Window) -> Tensor:
    """Return the attention that a window's queries pay to each key, by their sum or the largest: float32 [head, key]."""
    logits = _grouped_logits(window.query, window.key) * window.scale  # [kv_head, group, query, key]
    if window.softcap is not None:
        logits = window.softcap * torch.tanh(logits / window.softcap)
    key_index = torch.arange(window.key.shape[1], device=window.key.device)
    is_seen = (
        (key_index <= window.last_seen[:, None]) & (key_index >= window.first) & (key_index < window.end)
    )  # [query, key]
    weights = (
        logits.masked_fill(~is_seen, -torch.inf).softmax(-1).masked_fill(~is_seen, 0)
    )  # NaN for a query that sees nothing
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
    reduction: Reduction = reduced_attention,
) -> Tensor:
    """Return the attention that the observation queries of one chunk pay to each key, reduced over the queries: float32 [head, key].

    `query` is [head, query, width] and `key` [kv_head, key, width], both with their rotary positions applied; `key[:, i]` belongs to the
    token at index i. `query_index` [query] is the index of each query's token, negative for padding. Queries outside the prompt's last
    `observation_window` tokens count for nothing, and so do keys out of their sight: those may be NaN. Shapes are static; the two lengths
    may be 0-d tensors, so that one graph serves every prompt.
    """
    size = scorer.observation_window
    observes = (
        (query_index >= num_prompt_tokens - size) & (query_index >= 0) & (query_index < num_prompt_tokens)
    )
    # The rest of a chunk, in most chunks nearly all of it, is dropped before the product with the keys.
    index, rows = torch.where(observes, query_index, -1).topk(min(size, query_index.shape[0]))
    distance = (num_prompt_tokens - 1 - index).clamp(max=size)  # further for padding, whose votes are zeros
    half_life = scorer.observation_half_life or math.inf
    is_limited = scorer.softmax_domain is SoftmaxDomain.CANDIDATES
    window = Window(
        query[:, rows],
        key,
        last_seen=index,
        strength=torch.exp2(-distance / half_life),
        first=num_sink if is_limited else 0,
        end=candidates_end if is_limited else key.shape[1],
        scale=scale,
        softcap=softcap,
        is_sum=scorer.query_reduction is QueryReduction.SUM,
    )
    return reduction(window)


def join_votes(scorer: WindowScorer, votes: Tensor, more: Tensor) -> None:
    """Let `votes` [head, key], of which 0 stands for none, count the queries of `more` too."""
    if scorer.query_reduction is QueryReduction.SUM:
        votes += more
    else:
        torch.maximum(votes, more, out=votes)


def _grouped_logits(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries and keys, the query heads of a group folded into the query axis so that no key is repeated."""
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
    others: Tensor | None = None,
) -> Tensor:
    """Return the indices of the tokens to keep, ascending, and those of the `num_lent` next best, the best of them last.

    The result is int64 [kv_head, num_kept + num_lent], or [kv_head, end − num_sink] where no more are candidates.

    `votes` is [head, key], all `window_votes` joined. The highest `candidate_scores` win, or those of `others` [candidate] where these are
    higher, chunk by chunk if the scorer says so; among equals the earlier token does, and of the last chunk that there is room for its
    first tokens.
    """
    if end - num_sink <= num_kept:
        return torch.arange(num_sink, end, device=votes.device).repeat(num_kv_heads, 1)
    scores = candidate_scores(scorer, votes, num_kv_heads, num_sink, end)
    if others is not None:
        scores = torch.maximum(scores, others)
    if scorer.selection_chunk > 1:
        scores = _chunk_means(scores, scorer.selection_chunk)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : num_kept + num_lent]
    return num_sink + torch.cat([best[:, :num_kept].sort(dim=-1).values, best[:, num_kept:].flip(-1)], dim=-1)


def candidate_scores(
    scorer: WindowScorer, votes: Tensor, num_kv_heads: int, num_sink: int, end: int
) -> Tensor:
    """Return the votes [head, key] pooled along the candidates and reduced over each KV head's query heads: [kv_head, candidate]."""
    pooled = _pool(scorer, votes[:, num_sink:end]).view(num_kv_heads, -1, end - num_sink)
    return pooled.mean(1) if scorer.head_reduction is HeadReduction.MEAN else pooled.amax(1)


def _pool(scorer: WindowScorer, votes: Tensor) -> Tensor:
    """Pool along the sequence with stride 1; what lies beyond the borders takes no part."""
    size, shift = scorer.pooling_size, scorer.pooling_shift
    beyond = (size // 2 + shift, size // 2 - shift)
    if scorer.pooling_half_life > 0:
        fades = [2.0 ** (-abs(place - beyond[0]) / scorer.pooling_half_life) for place in range(size)]
        return _pool_fading(scorer.pooling, votes, beyond, fades)
    if scorer.pooling is Pooling.MAXIMUM:
        return functional.max_pool1d(functional.pad(votes, beyond, value=-torch.inf)[None], size, stride=1)[0]
    sums, counts = (
        functional.pad(each, beyond).unfold(-1, size, 1).sum(-1)
        for each in (votes, torch.ones_like(votes[:1]))
    )
    return sums / counts


def _pool_fading(pooling: Pooling, votes: Tensor, beyond: tuple[int, int], fades: Sequence[float]) -> Tensor:
    """Pool votes, of which none is negative, each multiplied by its place's fade. All places at once would take many times the memory."""
    num_candidates = votes.shape[1]

    def faded(numbers: Tensor) -> Iterator[Tensor]:
        padded = functional.pad(numbers, beyond)
        return (fade * padded[:, place : place + num_candidates] for place, fade in enumerate(fades))

    if pooling is Pooling.MAXIMUM:
        return functools.reduce(torch.maximum, faded(votes))
    return functools.reduce(torch.add, faded(votes)) / functools.reduce(
        torch.add, faded(torch.ones_like(votes[:1]))
    )


def _chunk_means(scores: Tensor, size: int) -> Tensor:
    """Give every token the mean score of its chunk; the last chunk may be shorter."""
    means = functional.avg_pool1d(scores, size, stride=size, ceil_mode=True)
    return means.repeat_interleave(size, dim=-1)[..., : scores.shape[-1]]

"""Which prompt tokens to keep: the observation window's votes (arXiv 2511.03092, equation 3, section
3.2.2).
"""

import torch
from torch import Tensor

from tests.reference.recipe import Recipe


def candidates(recipe: Recipe, num_prompt_tokens: int) -> range:
    """Return the indices of the prompt tokens that are neither sinks nor held as the newest."""
    end = max(recipe.num_sink, num_prompt_tokens - recipe.prompt_window)
    return range(recipe.num_sink, end + recipe.num_lent if end - recipe.num_sink > recipe.num_kept else end)


def votes(
    recipe: Recipe, queries: list[Tensor], keys: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """Return one KV head's score of every candidate. `queries` are [token, width], `keys` is [token,
    width].
    """
    return joint_votes(recipe, queries, [keys] * len(queries), scaling, softcap)


def joint_votes(
    recipe: Recipe, queries: list[Tensor], keys: list[Tensor], scaling: float, softcap: float | None
) -> Tensor:
    """Return the scores that query heads give together; each head has its own keys [token, width]."""
    pairs = zip(queries, keys, strict=True)
    return chunked(
        recipe,
        reduced(recipe, [attention_received(recipe, query, key, scaling, softcap) for query, key in pairs]),
    )


def reduced(recipe: Recipe, received: list[Tensor]) -> Tensor:
    """Return the score of every candidate from the attention that each query head pays to it."""
    stacked = torch.stack([_pooled(recipe, of_head) for of_head in received])
    return stacked.mean(0) if recipe.head_reduction == "mean" else stacked.amax(0)


def top(scores: Tensor, candidate_indices: range, num_kept: int) -> list[int]:
    """Return the indices of the best candidates, ascending; among equals the earlier one is better."""
    return sorted(_ranked(scores, candidate_indices)[:num_kept])


def next_best(scores: Tensor, candidate_indices: range, num_kept: int, num_lent: int) -> list[int]:
    """Return the indices of the `num_lent` candidates after the best `num_kept`, the best of them last."""
    return _ranked(scores, candidate_indices)[num_kept : num_kept + num_lent][::-1]


def _ranked(scores: Tensor, candidate_indices: range) -> list[int]:
    return [
        candidate_indices[offset]
        for offset in sorted(range(len(scores)), key=lambda offset: -float(scores[offset]))
    ]


ECHO_WEIGHT = 0.25


def attention_received(
    recipe: Recipe,
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None,
    num_held: int | None = None,
    num_voting: int | None = None,
    num_echoed: int = 0,
) -> Tensor:
    """Return the attention that one query head's observing tokens pay to every candidate.

    The candidates are among the first `num_held` tokens (None: all). The last `num_voting` tokens observe
    (None: the recipe's window). The first `num_echoed` of these echo the question.
    """
    num_tokens = len(keys)
    num_voting = num_voting or recipe.observation_window
    chosen = candidates(recipe, num_held or num_tokens)
    received = torch.zeros(len(chosen))
    for position in range(max(num_tokens - num_voting, 0), num_tokens):
        seen = range(chosen.start, min(chosen.stop, position + 1))
        domain = seen if recipe.softmax_over == "candidates" else range(position + 1)
        if not seen:
            continue
        logits = keys[domain.start : domain.stop] @ queries[position] * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.softmax(0)[seen.start - domain.start : seen.stop - domain.start]
        weights = torch.cat([weights, weights.new_zeros(len(chosen) - len(weights))])
        if position < num_tokens - num_voting + num_echoed:
            weights = weights * ECHO_WEIGHT
        elif recipe.observation_half_life > 0:
            fade = 0.5 ** ((num_tokens - 1 - position) / recipe.observation_half_life)
            weights = weights * max(fade, recipe.least_vote)
        received = received + weights if recipe.query_reduction == "sum" else torch.maximum(received, weights)
    return received


def _pooled(recipe: Recipe, scores: Tensor) -> Tensor:
    """Pool each score with its neighbours; there are none beyond the first and the last candidate."""
    reach = recipe.pooling_size // 2
    pooled = []
    for index in range(len(scores)):
        centre = index - recipe.pooling_shift
        near = torch.arange(max(0, centre - reach), min(centre + reach + 1, len(scores)))
        fade = (
            0.5 ** ((near - index).abs() / recipe.pooling_half_life)
            if recipe.pooling_half_life
            else torch.ones(len(near))
        )
        lent = scores[near] * fade
        pooled.append(lent.sum() / fade.sum() if recipe.pooling == "average" else lent.amax())
    return torch.stack(pooled)


def chunked(recipe: Recipe, scores: Tensor) -> Tensor:
    """Replace each score by the mean of its chunk. Chunks are counted from the first candidate."""
    size = recipe.selection_chunk
    chunks = [scores[first : first + size] for first in range(0, len(scores), size)]
    return torch.cat([chunk.mean().expand(len(chunk)) for chunk in chunks])

"""Thresholds against transformers' own warpers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from backends.torch_backend.sampling.filtering import score_threshold

VOCAB_SIZE = 50


def _warped(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    warpers = LogitsProcessorList()
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    ids: torch.LongTensor = torch.zeros(1, 1, dtype=torch.long)  # type: ignore[assignment]
    return warpers(ids, scores)


def _kept(scores: Tensor, *filters: tuple[int, float, float]) -> Tensor:
    top_k, top_p, min_p = zip(*filters, strict=True)
    return scores >= score_threshold(scores, torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, VOCAB_SIZE),
    top_p=st.integers(1, 100).map(lambda percent: percent / 100),
    min_p=st.integers(0, 100).map(lambda percent: percent / 100),
)
def test_keeps_the_same_tokens_as_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    scores = 3 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    expected = _warped(scores, top_k, top_p, min_p) > -torch.inf
    assert torch.equal(_kept(scores, (top_k, top_p, min_p)), expected)


def test_rows_are_filtered_apart() -> None:
    scores = torch.randn(1, VOCAB_SIZE).repeat(3, 1)
    kept = _kept(scores, (0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.0, 0.0))
    assert kept.sum(dim=1).tolist() == [VOCAB_SIZE, 3, 1]


@pytest.mark.parametrize("filters", [(2, 1.0, 0.0), (0, 0.3, 0.0)])
def test_equal_scores_stay_together(filters: tuple[int, float, float]) -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 0.0]])
    assert _kept(scores, filters).tolist() == [[False, True, False, True, True, False]]


def test_banned_tokens_stay_banned() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 0.0]])
    probabilities = scores.masked_fill(~_kept(scores, (3, 0.99, 0.0)), -torch.inf).softmax(dim=-1)
    assert probabilities.tolist() == [[0.5, 0.0, 0.5]]

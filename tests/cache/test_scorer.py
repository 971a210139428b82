"""Scorer options that are refused."""

import pytest

from cache.scorer import WindowScorer


@pytest.mark.parametrize("pooling_size", [0, 4, -3])
def test_a_pooling_window_has_an_odd_size(pooling_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {pooling_size}"):
        WindowScorer(pooling_size=pooling_size)


@pytest.mark.parametrize("pooling_shift", [-1, 3])
def test_a_shifted_window_still_holds_its_token(pooling_shift: int) -> None:
    with pytest.raises(
        ValueError, match=f"pooling_shift must be from 0 to half the pooling_size of 5, got {pooling_shift}"
    ):
        WindowScorer(pooling_shift=pooling_shift)


def test_a_selection_chunk_has_a_token() -> None:
    with pytest.raises(ValueError, match="selection_chunk must be at least 1, got 0"):
        WindowScorer(selection_chunk=0)


def test_an_observation_window_has_a_token() -> None:
    with pytest.raises(ValueError, match="observation_window must be at least 1, got 0"):
        WindowScorer(observation_window=0)

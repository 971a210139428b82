"""Scorer options that are refused."""

from collections.abc import Callable

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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: WindowScorer(observation_window=0), "observation_window must be at least 1, got 0"),
        (lambda: WindowScorer(observation_half_life=-1), "observation_half_life must be at least 0, got -1"),
        (lambda: WindowScorer(pooling_half_life=-1), "pooling_half_life must be at least 0, got -1"),
        (lambda: WindowScorer(selection_chunk=0), "selection_chunk must be at least 1, got 0"),
        (lambda: WindowScorer(num_echoed=-1), "num_echoed must be at least 0, got -1"),
    ],
)
def test_numbers_have_a_least_value(make: Callable[[], WindowScorer], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()

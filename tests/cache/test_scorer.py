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


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("observation_window", 1),
        ("observation_half_life", 0),
        ("pooling_half_life", 0),
        ("selection_chunk", 1),
        ("num_echoed", 0),
    ],
)
def test_numbers_have_a_least_value(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
        WindowScorer(**{name: least - 1})

"""Intervals against published and closed-form values, and against the normal approximation."""

import random
import statistics

import pytest

from commands.eval.statistics import bootstrap_interval, mean_interval, mean_of_means, score_interval


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [
        ([100.0] * 50 + [0.0] * 50, 40.383, 59.617),  # 0.5 ∓ 1.96 √(0.25 / n + z² / 4 n²) / (1 + z² / n)
        ([100.0] * 10, 72.247, 100.0),  # n / (n + z²)
        ([0.0] * 200, 0.0, 1.885),  # z² / (n + z²)
        (
            [100.0] * 81 + [0.0] * 182,
            25.525,
            36.622,
        ),  # Newcombe 1998, table I: 81 of 263 are 0.2553 to 0.3662
    ],
)
def test_wilson_intervals_equal_published_values(scores: list[float], low: float, high: float) -> None:
    assert score_interval(scores) == pytest.approx((low, high), abs=0.005)


def test_the_interval_of_a_mean_over_tasks() -> None:
    assert mean_interval([[100.0] * 10]) == pytest.approx(score_interval([100.0] * 10))
    assert mean_interval([[100.0] * 10] * 4) == pytest.approx(
        (100 - 27.753 / 2, 100), abs=0.005
    )  # the half of one task's, for four
    groups = [[100.0] * 600 + [0.0] * 400, [100.0] * 300 + [0.0] * 700]
    assert mean_interval(groups) == pytest.approx(bootstrap_interval(groups), abs=0.1)


def test_the_bootstrap_of_two_cases_is_exact() -> None:
    """Means of 0, 50 and 100 come in 1/4, 1/2 and 1/4 of the resamples."""
    assert bootstrap_interval([[0.0, 100.0]]) == (0.0, 100.0)
    assert bootstrap_interval([[7.0] * 30, [3.0] * 4]) == pytest.approx((5.0, 5.0))


def test_the_bootstrap_converges_to_the_normal_interval() -> None:
    source = random.Random(1)
    groups = [[source.gauss(50 + place, 10) for _ in range(400)] for place in range(4)]
    error = sum(statistics.pvariance(group) / len(group) for group in groups) ** 0.5 / len(groups)
    mean = mean_of_means(groups)
    assert bootstrap_interval(groups) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.06)


def test_the_bootstrap_is_the_same_each_time() -> None:
    scores = [[1.37**number for number in range(20)]]
    assert bootstrap_interval(scores) == bootstrap_interval(scores) != bootstrap_interval(scores, seed=1)

"""Arrival times: reproducible by their seed, and with the requested distribution."""

import math
import statistics
from itertools import pairwise

import pytest

from commands.loadtest.arrivals import arrival_times


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def test_a_seed_repeats_its_arrivals() -> None:
    assert arrival_times(50, 3.0, 1.0, "7") == arrival_times(50, 3.0, 1.0, "7")
    assert arrival_times(50, 3.0, 1.0, "7") != arrival_times(50, 3.0, 1.0, "8")


def test_more_requests_do_not_change_the_first_arrivals() -> None:
    assert arrival_times(50, 3.0, 1.0, "7") == arrival_times(80, 3.0, 1.0, "7")[:50]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(4, math.inf, 1.0, "0") == [0.0] * 4


def test_first_arrival_is_zero_and_others_are_in_order() -> None:
    times = arrival_times(100, 5.0, 0.5, "1")
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) == 100


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / √k.

    Shape 1 is a Poisson process.
    """
    spaces = gaps(arrival_times(20_000, 4.0, burstiness, "3"))
    mean = statistics.fmean(spaces)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(spaces) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_arrivals_per_second_have_a_variance_like_their_mean() -> None:
    times = arrival_times(20_000, 4.0, 1.0, "5")
    counts = [0] * (int(times[-1]) + 1)
    for time in times:
        counts[int(time)] += 1
    assert statistics.pvariance(counts) / statistics.fmean(counts) == pytest.approx(1, rel=0.1)

"""95 % intervals: of a task's score, of a mean over tasks, and of a difference paired case by case."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Interval: TypeAlias = tuple[float, float]

_Z = 1.959963984540054  # of 95 % of a normal distribution
NUM_RESAMPLES = 10_000


def score_interval(scores: Sequence[float]) -> Interval:
    """Return Wilson's interval for the mean of scores from 0 to 100; wide enough for those in between too, whose variance is smaller."""
    count, share = len(scores), sum(scores) / len(scores) / 100
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return 100 * max(centre - half, 0.0), 100 * min(centre + half, 1.0)


def mean_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the interval of the mean of the groups' means, from the groups' own.

    Their distances to the mean add up as errors do (MOVER: Zou and Donner 2008), which stays honest where every score is 0 or 100.
    """
    means = [sum(group) / len(group) for group in groups]
    intervals = [score_interval(group) for group in groups]
    below, above = (
        math.hypot(*(mean - interval[side] for mean, interval in zip(means, intervals, strict=True)))
        for side in (0, 1)
    )
    centre = sum(means) / len(means)
    return centre - below / len(means), centre + above / len(means)


def bootstrap_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Return the percentile bootstrap of the mean of the groups' means: cases are drawn again within each group.

    Given the differences of the same cases it is the paired bootstrap.
    """
    source = np.random.default_rng(seed)
    means = np.zeros(NUM_RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        # How often each case is drawn says as much as which ones are, in far less memory.
        counts = source.multinomial(len(values), np.full(len(values), 1 / len(values)), size=NUM_RESAMPLES)
        means += counts @ values / len(values)
    low, high = np.percentile(means / len(groups), [2.5, 97.5])
    return float(low), float(high)


def mean_of_means(groups: Sequence[Sequence[float]]) -> float:
    return sum(sum(group) / len(group) for group in groups) / len(groups)

"""95 % intervals of a task's score, of a mean over tasks, and of a difference paired by case."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Interval: TypeAlias = tuple[float, float]

_Z = 1.959963984540054  # the central 95 % of a normal distribution, in standard deviations
NUM_RESAMPLES = 10_000


def score_interval(scores: Sequence[float]) -> Interval:
    """Return Wilson's interval for the mean of scores from 0 to 100.

    It is defined for scores of 0 or 100. Scores in between have a smaller variance, so it is wide enough for
    them.
    """
    count = len(scores)
    share = sum(scores) / count / 100
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return 100 * max(centre - half, 0.0), 100 * min(centre + half, 1.0)


def mean_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the interval of the mean of the groups' means, from the interval of each group.

    The distances from mean to bound add up in quadrature (MOVER: Zou and Donner 2008). Unlike a normal
    approximation, the interval has a width even if every score is 0 or 100.
    """
    means = [sum(group) / len(group) for group in groups]
    intervals = [score_interval(group) for group in groups]
    below = math.hypot(*(mean - interval[0] for mean, interval in zip(means, intervals, strict=True)))
    above = math.hypot(*(mean - interval[1] for mean, interval in zip(means, intervals, strict=True)))
    centre = sum(means) / len(means)
    return centre - below / len(means), centre + above / len(means)


def bootstrap_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Return the percentile bootstrap of the mean of the groups' means.

    Cases are resampled within each group.

    For differences of the same cases it is the paired bootstrap.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(NUM_RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        # Resamples as counts [resample, case]: one draw, and a matrix product instead of gathers.
        counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=NUM_RESAMPLES)
        means += counts @ values / len(values)
    low, high = np.percentile(means / len(groups), [2.5, 97.5])
    return float(low), float(high)


def mean_of_means(groups: Sequence[Sequence[float]]) -> float:
    return sum(sum(group) / len(group) for group in groups) / len(groups)

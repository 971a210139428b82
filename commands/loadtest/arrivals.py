"""When requests arrive in an open loop."""

import math
import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float, seed: str) -> list[float]:
    """Return the arrival times of `count` requests in seconds from the run's start. The first is 0.

    Gaps follow a gamma distribution of mean 1 / `rate` and shape `burstiness`. Shape 1 is a Poisson process.
    At an infinite rate all requests arrive at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(f"arrivals/{seed}")
    gaps = (source.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))

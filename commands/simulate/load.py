"""The load that plans are made for: arrivals at a mean rate of one a second, and what they have in common."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from commands.simulate.arrivals import HASH_TOKENS, Arrival
from commands.simulate.switching import check_model

_TYPICAL = 16  # prompts by which a draft's share of the time is counted


@dataclass(frozen=True, eq=False)
class Load:
    """Arrivals of a mean rate of one a second, the longest sequence, and the mean lengths in tokens.

    `mean_restored` of a prompt's tokens begin earlier prompts, too.
    """

    arrivals: tuple[Arrival, ...]
    max_model_len: int
    mean_restored: int = 0

    def at(self, rate: float, num_requests: int) -> list[Arrival]:
        """Return the first arrivals at this rate, and the same again after the last one.

        Those of another round share no prompts with the ones before.
        """
        size = len(self.arrivals)
        num_hashes = 1 + max((max(one.hash_ids, default=0) for one in self.arrivals), default=0)
        rounds = (divmod(index, size) for index in range(num_requests))
        return [
            replace(
                self.arrivals[index],
                time=(self.arrivals[index].time + number * size) / rate,
                hash_ids=tuple(hash_id + number * num_hashes for hash_id in self.arrivals[index].hash_ids),
            )
            for number, index in rounds
        ]

    @cached_property
    def mean_prompt(self) -> int:
        return max(1, round(statistics.fmean(arrival.num_prompt_tokens for arrival in self.arrivals)))

    @cached_property
    def typical_prompts(self) -> list[int]:
        """Lengths of prompts from short to long, each of which stands for about as many requests."""
        lengths = sorted(arrival.num_prompt_tokens for arrival in self.arrivals)
        count = min(_TYPICAL, len(lengths))
        return [lengths[(2 * index + 1) * len(lengths) // (2 * count)] for index in range(count)]

    @cached_property
    def mean_output(self) -> float:
        return statistics.fmean(arrival.num_output_tokens for arrival in self.arrivals)


def load_of(arrivals: Sequence[Arrival], max_model_len: int) -> Load:
    """Return the load of these arrivals. Their times are scaled. Raises ValueError for fewer than two."""
    span = arrivals[-1].time - arrivals[0].time if len(arrivals) > 1 else 0.0
    if span <= 0:
        raise ValueError("a load needs at least two requests at different times")
    scale = (len(arrivals) - 1) / span
    start = arrivals[0].time
    scaled = tuple(replace(one, time=(one.time - start) * scale) for one in arrivals)
    return Load(scaled, max_model_len, mean_restored(arrivals))


@lru_cache(maxsize=4)
def by_model(load: Load, names: tuple[str, ...]) -> list[tuple[int, float, Load]]:
    """Return each model's number, its share of the requests, and the load of those that may be its own.

    Models without requests are left out. Raises TraceError for a model that is not among these.
    """
    for arrival in load.arrivals:
        check_model(arrival, names)
    found = []
    for index, name in enumerate(names):
        own = tuple(one for one in load.arrivals if one.model in ("", name))
        if own:
            share = sum(1.0 if one.model else 1 / len(names) for one in own) / len(load.arrivals)
            found.append((index, share, replace(load, arrivals=own)))
    return found


def mean_restored(arrivals: Sequence[Arrival]) -> int:
    """Return how many of a prompt's tokens begin earlier prompts on average, if none is ever forgotten."""
    seen: set[int] = set()
    num_restored = 0
    for one in arrivals:
        num_known = sum(1 for _ in itertools.takewhile(seen.__contains__, one.block_ids))
        num_restored += min(num_known * HASH_TOKENS, one.num_prompt_tokens - 1)
        seen.update(one.block_ids)
    return num_restored // len(arrivals)

"""Traces of requests: who arrives when, with how long a prompt and how long an answer. Read from files, or drawn from a seed."""

import csv
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace that cannot be read."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `time` in seconds since the trace's start."""

    time: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the arrivals of a file, in order of time. Raises TraceError with the line.

    JSON lines, ours (`time`, `num_prompt_tokens`, `num_output_tokens`) or Mooncake's (`timestamp` in milliseconds, `input_length`,
    `output_length`; vLLM's benchmark reads the same); or a CSV file with BurstGPT's columns.
    """
    with path.open(newline="") as file:
        rows: Iterator[dict[str, Any]] = (
            csv.DictReader(file) if path.suffix == ".csv" else (json.loads(line) for line in file if line.strip())
        )
        last = -math.inf
        for number in itertools.count(1):
            try:
                arrival = _arrival(next(rows))
            except StopIteration:
                return
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, entry {number}: {error!r}") from error
            if arrival.time < last:
                raise TraceError(f"{path}, entry {number}: time {arrival.time} lies before the entry above, {last}")
            last = arrival.time
            yield arrival


def _arrival(row: dict[str, Any]) -> Arrival:
    if "timestamp" in row:
        return _checked(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"])
    if "Timestamp" in row:
        return _checked(float(row["Timestamp"]), row["Request tokens"], row["Response tokens"])
    return _checked(float(row["time"]), row["num_prompt_tokens"], row["num_output_tokens"])


def _checked(time: float, num_prompt_tokens: Any, num_output_tokens: Any) -> Arrival:
    arrival = Arrival(time, int(num_prompt_tokens), int(num_output_tokens))
    if not math.isfinite(time) or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
        raise ValueError(f"{arrival} needs a finite time and at least one token each way")
    return arrival


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a drawn trace looks like: a mean rate in requests a second, a shape over time, and mean lengths in tokens."""

    rate: float
    num_requests: int
    mean_prompt_tokens: float = 1000.0
    mean_output_tokens: float = 200.0
    shape: str = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise TraceError(f"a trace's shape is one of {', '.join(SHAPES)}, got {self.shape!r}")
        if not self.rate > 0 or self.num_requests < 1 or min(self.mean_prompt_tokens, self.mean_output_tokens) < 1:
            raise TraceError(f"a trace needs a rate above 0, a request, and lengths of at least one token: {self}")

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the arrivals: an inhomogeneous Poisson process, by thinning, with lengths of a gamma distribution."""
        draw, intensity, peak = random.Random(self.seed), *SHAPES[self.shape]
        time = 0.0
        for _ in range(self.num_requests):
            time += draw.expovariate(self.rate * peak)
            while draw.random() * peak > intensity(time):
                time += draw.expovariate(self.rate * peak)
            yield Arrival(time, _length(draw, self.mean_prompt_tokens), _length(draw, self.mean_output_tokens))


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.gammavariate(2.0, mean / 2)))


def _day(time: float) -> float:
    """Quietest at the start and end of a day of 86,400 s, twice the mean at noon."""
    return 1 - math.cos(2 * math.pi * time / 86400)


def _bursts(time: float) -> float:
    """One minute in five at four times the mean, the others at a quarter of it."""
    return 4.0 if time % 300 < 60 else 0.25


SHAPES: dict[str, tuple[Callable[[float], float], float]] = {
    "poisson": (lambda _: 1.0, 1.0),
    "bursts": (_bursts, 4.0),
    "day": (_day, 2.0),
}

"""Traces of requests: who arrives when, with how long a prompt and how long an answer. Read from files, or drawn from a seed."""

import csv
import enum
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO


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
    with path.open(newline="", errors="replace") as file:
        last = -math.inf
        for number, read in _csv_rows(file) if path.suffix == ".csv" else _json_rows(file):
            try:
                arrival = _arrival(read())
            except KeyError as error:
                raise TraceError(f"{path}, line {number}: {error} is missing") from error
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            if arrival.time < last:
                raise TraceError(
                    f"{path}, line {number}: time {arrival.time} lies before that of the line above, {last}"
                )
            last = arrival.time
            yield arrival


def _json_rows(file: TextIO) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the number of each line that is not empty, and what reads it."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, partial(json.loads, line)


def _csv_rows(file: TextIO) -> Iterator[tuple[int, Callable[[], Any]]]:
    """As `_json_rows`; BurstGPT's failed requests, whose answers have no token, are left out."""
    reader = csv.DictReader(file)
    for row in reader:
        if row.get("Response tokens") != "0":
            yield reader.line_num, partial(dict, row)


def _arrival(row: Any) -> Arrival:
    if not isinstance(row, dict):
        raise TypeError(f"{row!r} is no object")
    if "timestamp" in row:
        return _checked(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"])
    if "Timestamp" in row:
        return _checked(float(row["Timestamp"]), row["Request tokens"], row["Response tokens"])
    return _checked(float(row["time"]), row["num_prompt_tokens"], row["num_output_tokens"])


def _checked(time: float, num_prompt_tokens: Any, num_output_tokens: Any) -> Arrival:
    arrival = Arrival(time, int(num_prompt_tokens), int(num_output_tokens))
    if not math.isfinite(time) or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
        raise ValueError(
            f"a request needs a finite time and at least one token each way, "
            f"got {time}, {arrival.num_prompt_tokens} and {arrival.num_output_tokens}"
        )
    return arrival


class ShapeName(enum.StrEnum):
    """How the rate of drawn arrivals changes over time."""

    POISSON = "poisson"
    BURSTS = "bursts"
    DAY = "day"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a drawn trace looks like: a mean rate in requests a second, a shape over time, and mean lengths in tokens."""

    rate: float
    num_requests: int
    mean_prompt_tokens: float = 1000.0
    mean_output_tokens: float = 200.0
    shape: ShapeName = ShapeName.POISSON
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            not 0 < self.rate < math.inf
            or self.num_requests < 1
            or min(self.mean_prompt_tokens, self.mean_output_tokens) < 1
        ):
            raise TraceError(
                f"a trace needs a finite rate above 0, a request, and lengths of at least one token: {self}"
            )

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the arrivals: an inhomogeneous Poisson process, by thinning, with lengths of a gamma distribution."""
        draw, intensity, peak = random.Random(self.seed), *_SHAPES[self.shape]
        time = 0.0
        for _ in range(self.num_requests):
            time += draw.expovariate(self.rate * peak)
            while draw.random() * peak > intensity(time):
                time += draw.expovariate(self.rate * peak)
            yield Arrival(
                time, _length(draw, self.mean_prompt_tokens), _length(draw, self.mean_output_tokens)
            )


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.gammavariate(2.0, mean / 2)))


def _day(time: float) -> float:
    """Quietest at the start and end of a day of 86,400 s, twice the mean at noon."""
    return 1 - math.cos(2 * math.pi * time / 86400)


def _bursts(time: float) -> float:
    """One minute in five at four times the mean, the others at a quarter of it."""
    return 4.0 if time % 300 < 60 else 0.25


_SHAPES: dict[ShapeName, tuple[Callable[[float], float], float]] = {
    ShapeName.POISSON: (lambda _: 1.0, 1.0),
    ShapeName.BURSTS: (_bursts, 4.0),
    ShapeName.DAY: (_day, 2.0),
}

"""Traces of requests (arrival times, prompt and answer lengths), read from a file or drawn from a seed."""

import csv
import enum
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

HASH_TOKENS = 512  # of a block that a hash id stands for, in Mooncake's traces
_MAX_HASH_ID = 2**62
_LONGEST = 366 * 86400.0  # seconds between the first and the last request


class TraceError(ValueError):
    """A trace cannot be read."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `time` in seconds since the trace's start.

    Its prompt was read elsewhere in the last `seconds_elsewhere` before that time. Prompts whose `hash_ids`
    begin alike begin with the same blocks of `HASH_TOKENS` tokens. Without them, nothing is known of the
    prompt but its length.
    """

    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    seconds_elsewhere: float = 0.0
    hash_ids: tuple[int, ...] = ()
    model: str = ""  # by name; of the one model, or of any if there are several

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The hash ids of the prompt's complete blocks."""
        return self.hash_ids[: self.num_prompt_tokens // HASH_TOKENS]


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the arrivals of a file, in order of time. Raises `TraceError` with the line.

    The formats are:

    - our JSON lines: `time` in seconds, `num_prompt_tokens`, `num_output_tokens`, and `model` if there are
      several;
    - Mooncake's JSON lines, which vLLM's benchmark reads too: `timestamp` in milliseconds, `input_length`,
      `output_length`; either may have `hash_ids`;
    - a CSV file with the columns of BurstGPT or of Azure's traces.
    """
    with path.open(newline="", errors="replace") as file:
        first_time: float | None = None
        previous_time = -math.inf
        for line_number, parse in _csv_rows(file) if path.suffix == ".csv" else _json_rows(file):
            try:
                arrival = _arrival(parse())
            except KeyError as error:
                raise TraceError(f"{path}, line {line_number}: {error} is missing") from error
            except (TypeError, ValueError, OverflowError) as error:
                raise TraceError(f"{path}, line {line_number}: {error}") from error
            if arrival.time < previous_time:
                raise TraceError(
                    f"{path}, line {line_number}: time {arrival.time} is before {previous_time}, "
                    "the time of the previous request"
                )
            first_time = arrival.time if first_time is None else first_time
            if arrival.time - first_time > _LONGEST:
                raise TraceError(f"{path}, line {line_number}: a trace must be of at most a year")
            previous_time = arrival.time
            yield arrival


def _json_rows(file: TextIO) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the number and the parser of each line that is not blank.

    The caller names the line of an error.
    """
    for line_number, line in enumerate(file, start=1):
        if line.strip():
            yield line_number, partial(json.loads, line)


def _csv_rows(file: TextIO) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Like `_json_rows`. BurstGPT's failed requests, whose answers have no token, are skipped."""
    reader = csv.DictReader(file)
    for row in reader:
        if row.get("Response tokens") != "0":
            # A line that ends early has None for the rest of its columns.
            yield (
                reader.line_num,
                partial(dict, ((name, value) for name, value in row.items() if value is not None)),
            )


def _arrival(row: Any) -> Arrival:
    if not isinstance(row, dict):
        raise TypeError(f"expected a JSON object, got {row!r}")
    hash_ids = row.get("hash_ids", ())
    if "timestamp" in row:
        return _checked(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"], hash_ids)
    if "TIMESTAMP" in row:
        time = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
        return _checked(time, row["ContextTokens"], row["GeneratedTokens"])
    if "Timestamp" in row:
        return _checked(float(row["Timestamp"]), row["Request tokens"], row["Response tokens"])
    arrival = _checked(float(row["time"]), row["num_prompt_tokens"], row["num_output_tokens"], hash_ids)
    return replace(arrival, model=str(row.get("model", "")))


def _checked(time: float, num_prompt_tokens: Any, num_output_tokens: Any, hash_ids: Any = ()) -> Arrival:
    if not isinstance(hash_ids, list | tuple) or not all(isinstance(hash_id, int) for hash_id in hash_ids):
        raise TypeError(f"hash_ids must be a list of whole numbers, got {hash_ids!r}")
    arrival = Arrival(time, int(num_prompt_tokens), int(num_output_tokens), hash_ids=tuple(hash_ids))
    if not math.isfinite(time) or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
        raise ValueError(
            "a request needs a finite time and at least one token each in prompt and answer, "
            f"got time {time}, {arrival.num_prompt_tokens} and {arrival.num_output_tokens} tokens"
        )
    if arrival.hash_ids and len(arrival.hash_ids) < arrival.num_prompt_tokens // HASH_TOKENS:
        raise ValueError(
            f"hash_ids must have one for each complete block of {HASH_TOKENS} tokens, got "
            f"{len(arrival.hash_ids)} for {arrival.num_prompt_tokens} tokens"
        )
    if not all(0 <= hash_id < _MAX_HASH_ID for hash_id in arrival.hash_ids):
        raise ValueError(f"hash_ids must be from 0 to 2^62 - 1, got {arrival.hash_ids}")
    return arrival


class ShapeName(enum.StrEnum):
    """The shape of the rate of drawn arrivals over time."""

    POISSON = "poisson"
    BURSTS = "bursts"
    DAY = "day"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A drawn trace: a mean rate in requests per second, a shape over time, and mean lengths in tokens."""

    rate: float
    num_requests: int
    mean_prompt_tokens: float = 1000.0
    mean_output_tokens: float = 200.0
    shape: ShapeName = ShapeName.POISSON
    seed: int = 0
    varies: bool = True  # lengths are drawn; otherwise all are the means

    def __post_init__(self) -> None:
        if (
            not 0 < self.rate < math.inf
            or self.num_requests < 1
            or min(self.mean_prompt_tokens, self.mean_output_tokens) < 1
        ):
            raise TraceError(
                "a trace needs a finite rate above 0, at least one request, and mean lengths of at least "
                f"one token, got {self}"
            )
        if self.num_requests / self.rate > _LONGEST:
            raise TraceError(
                f"a trace must be of at most a year, got {self.num_requests} requests at {self.rate} a second"
            )

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the arrivals of an inhomogeneous Poisson process. Drawn lengths are gamma distributed."""
        rng = random.Random(self.seed)
        intensity, peak = _SHAPES[self.shape]
        time = 0.0
        for _ in range(self.num_requests):
            # Thinning: candidates arrive at the peak rate, and each is kept with probability intensity /
            # peak.
            time += rng.expovariate(self.rate * peak)
            while rng.random() * peak > intensity(time):
                time += rng.expovariate(self.rate * peak)
            means = (self.mean_prompt_tokens, self.mean_output_tokens)
            prompt, output = (_length(rng, mean) if self.varies else round(mean) for mean in means)
            yield Arrival(time, prompt, output)


def _length(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.gammavariate(2.0, mean / 2)))


def _day(time: float) -> float:
    """Return the intensity of a day of 86,400 s: none at its start and end, twice the mean at noon."""
    return 1 - math.cos(2 * math.pi * time / 86400)


def _bursts(time: float) -> float:
    """Return four times the mean for one minute in five, and a quarter of the mean for the other four."""
    return 4.0 if time % 300 < 60 else 0.25


# For each shape: the intensity over time, whose mean is 1, and its maximum.
_SHAPES: dict[ShapeName, tuple[Callable[[float], float], float]] = {
    ShapeName.POISSON: (lambda _: 1.0, 1.0),
    ShapeName.BURSTS: (_bursts, 4.0),
    ShapeName.DAY: (_day, 2.0),
}

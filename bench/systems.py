"""What can be loaded and compared: servers through HTTP, engines in a process of their own. Each gives the figures of `snapserve bench`."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from commands.loadtest.answer import Answer
from commands.loadtest.config import Address, BenchConfig, Load
from commands.loadtest.measure import measure
from commands.loadtest.prompts import make_prompts
from commands.loadtest.report import Figure, Report, make_report
from commands.loadtest.run import Run
from commands.loadtest.target import TargetError
from server.serve import SPIN_COUNT

PERCENTILES = (90.0, 99.0)
ROOT = Path(__file__).parents[1]


class MeasurementError(Exception):
    """A side that gave no figures; the message says why."""


class System(Protocol):
    """One side of a comparison."""

    def measure(self, load: Load) -> Mapping[str, Figure]:
        """Run a load once. Raises `MeasurementError`."""
        ...


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server that runs already, and how long its start took."""

    address: Address
    seconds_to_ready: float

    def measure(self, load: Load) -> Mapping[str, Figure]:
        config = BenchConfig(self.address, None, 1, load, PERCENTILES, None, None, failures_are_allowed=True)
        try:
            result = asyncio.run(measure(config))
        except TargetError as error:
            raise MeasurementError(str(error)) from error
        assert isinstance(result.figures, Report)
        for reason, count in result.figures.failures.items():
            print(
                f"{self.address.base_url}: {count} × {reason}: {result.figures.examples[reason]}",
                file=sys.stderr,
            )
        return {**result.figures.figures, "seconds_to_ready": self.seconds_to_ready}


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """Our engine, with these options of `snapserve serve`."""

    options: Sequence[str]

    def measure(self, load: Load) -> Mapping[str, Figure]:
        flags = {
            "--num-prompts": load.num_prompts,
            "--random-input-len": load.input_len,
            "--random-output-len": load.output_len,
            "--random-vocab-size": load.vocab_size,
            "--max-concurrency": load.max_concurrency or load.num_prompts,
            "--num-warmups": load.num_warmups,
            "--seed": load.seed,
        }
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "bench.engine", *self.options, "--json", str(result)]
            command += [part for flag, value in flags.items() for part in (flag, str(value))]
            _call(command, load.timeout, {"GOMP_SPINCOUNT": SPIN_COUNT})
            return _numbers(json.loads(result.read_text()))


@dataclass(frozen=True, slots=True)
class OpenVinoEngine:
    """OpenVINO GenAI in a Python that has it. `eviction`: sink, recent and all tokens that are held, or None to hold every token."""

    python: str
    model: Path
    kv_precision: str
    eviction: tuple[int, int, int] | None = None

    def measure(self, load: Load) -> Mapping[str, Figure]:
        job = {
            "model": str(self.model),
            "kv_precision": self.kv_precision,
            "eviction": self.eviction,
            "max_concurrency": load.max_concurrency or load.num_prompts,
            "warmups": _token_prompts(load, f"warm-up {load.seed}", load.num_warmups),
            "prompts": _token_prompts(load, str(load.seed), load.num_prompts),
        }
        with tempfile.TemporaryDirectory() as folder:
            task, result = Path(folder) / "job.json", Path(folder) / "result.json"
            task.write_text(json.dumps(job))
            _call(
                [self.python, str(ROOT / "bench" / "openvino_engine.py"), str(task), str(result)],
                load.timeout,
            )
            told = json.loads(result.read_text())
        answers = tuple(
            Answer(**{**record, "contents": tuple(record["contents"])}) for record in told["records"]
        )
        return {
            **make_report(Run(answers, told["duration"]), PERCENTILES).figures,
            "seconds_to_ready": told["seconds_to_ready"],
        }


def measure_in_turns(
    sides: Sequence[System], load: Load, rounds: int
) -> list[tuple[list[Mapping[str, Figure]], MeasurementError | None]]:
    """Measure every side once a round, with the same prompts in a round; who goes first changes. One that failed is left out."""
    figures: list[list[Mapping[str, Figure]]] = [[] for _ in sides]
    errors: dict[int, MeasurementError] = {}
    for number in range(rounds):
        for place in range(len(sides)):
            index = (place + number) % len(sides)
            if index in errors:
                continue
            try:
                figures[index].append(
                    sides[index].measure(load.model_copy(update={"seed": load.seed + number}))
                )
            except MeasurementError as error:
                errors[index] = error
    return [(own, errors.get(index)) for index, own in enumerate(figures)]


def _token_prompts(load: Load, seed: str, count: int) -> list[dict[str, Any]]:
    return [
        {"token_ids": prompt.content, "max_tokens": prompt.max_tokens}
        for prompt in make_prompts(load, None, seed, count)
    ]


def _numbers(document: Mapping[str, Any]) -> dict[str, Figure]:
    return {
        name: value for name, value in document.items() if value is None or isinstance(value, (int, float))
    }


def _call(command: Sequence[str], time_limit: float, environment: Mapping[str, str] | None = None) -> None:
    try:
        env = {**os.environ, **(environment or {})}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=time_limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(str(error)) from error
    if done.returncode != 0:
        raise MeasurementError(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr[-500:]}")

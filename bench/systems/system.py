"""The systems that can be loaded and compared: servers through HTTP, and engines in another process.

Each measures the figures of `snapserve bench`.
"""

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
ROOT = Path(__file__).parents[2]


class MeasurementError(Exception):
    """A system could not be measured."""


class System(Protocol):
    """A system that can be loaded and measured."""

    def measure(self, load: Load) -> Mapping[str, Figure]:
        """Run a load once. Raises `MeasurementError`."""
        ...


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A running server, and how long its start took."""

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
    """OpenVINO GenAI. `eviction` is the number of sink, recent and total tokens; None does not evict."""

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
            job_path = Path(folder) / "job.json"
            result_path = Path(folder) / "result.json"
            job_path.write_text(json.dumps(job))
            _call(
                [
                    self.python,
                    str(ROOT / "bench" / "systems" / "openvino_engine.py"),
                    str(job_path),
                    str(result_path),
                ],
                load.timeout,
            )
            result = json.loads(result_path.read_text())
        answers = tuple(
            Answer(**{**record, "contents": tuple(record["contents"])}) for record in result["records"]
        )
        return {
            **make_report(Run(answers, result["duration"]), PERCENTILES).figures,
            "seconds_to_ready": result["seconds_to_ready"],
        }


def measure_in_turns(
    systems: Sequence[System], load: Load, rounds: int
) -> list[tuple[list[Mapping[str, Figure]], MeasurementError | None]]:
    """Measure every system once per round, with the same prompts within a round. The first one alternates.

    A system that fails is not measured again; its error is returned with its figures.
    """
    figures: list[list[Mapping[str, Figure]]] = [[] for _ in systems]
    errors: dict[int, MeasurementError] = {}
    for round_index in range(rounds):
        round_load = load.model_copy(update={"seed": load.seed + round_index})
        for turn in range(len(systems)):
            index = (turn + round_index) % len(systems)
            if index in errors:
                continue
            try:
                figures[index].append(systems[index].measure(round_load))
            except MeasurementError as error:
                errors[index] = error
    return [(of_system, errors.get(index)) for index, of_system in enumerate(figures)]


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
        raise MeasurementError(f"{' '.join(command[:3])} exited with {done.returncode}: {done.stderr[-500:]}")

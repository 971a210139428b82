"""The suite's prompts answered by NVIDIA's kvpress, with as many entries as a slot of ours has; scored as every answer is.

What runs in kvpress' environment is `bench/kvpress_worker.py`; here is what it is told, and what is made of its answers.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.systems import ROOT, MeasurementError
from commands.eval.completer import Completion
from commands.eval.prompts import Prompt
from commands.eval.ruler import task_scores
from commands.eval.run import Run
from commands.shared.progress import ProgressLine
from server.text.tokenizer import Tokenizer

WORKER = (str(ROOT / "bench" / "kvpress_worker.py"),)


@dataclass(frozen=True, slots=True)
class NamedSetting:
    """A policy by the name that a comparison gives it."""

    policy: str
    compression: float | None
    is_control: bool = False

    @property
    def label(self) -> str:
        return self.policy if self.compression is None else f"{self.policy} {self.compression:g}x"


@dataclass(frozen=True, slots=True)
class Kvpress:
    """A Python that has kvpress, and the model's folder. `side` is the program that it runs."""

    python: str
    model: str
    dtype: str = "auto"
    worker: Sequence[str] = WORKER

    def run(
        self,
        setting: NamedSetting,
        press: str | None,
        prompts: Mapping[str, Sequence[Prompt]],
        tokenizer: Tokenizer,
        length: int,
    ) -> Run:
        """Answer every prompt and score it. Raises `MeasurementError`."""
        every = [prompt for of_task in prompts.values() for prompt in of_task]
        num_entries = None if setting.compression is None else int(length / setting.compression)
        lines = self.answers(press, every, num_entries, title=setting.label)
        told = next(lines)
        answers = [line["token_ids"] for line in lines]
        completions = iter(
            [Completion(tokenizer.decode(token_ids), len(token_ids), len(token_ids)) for token_ids in answers]
        )
        tasks = {
            name: task_scores(of_task, [next(completions) for _ in of_task])
            for name, of_task in prompts.items()
        }
        return Run(setting, (told["press"], *told["versions"]), tasks)

    def answers(
        self,
        press: str | None,
        prompts: Sequence[Prompt],
        num_entries: int | None,
        *,
        title: str,
        tells_entries: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Yield what the side says: first of itself, then of each prompt. Raises `MeasurementError`."""
        job = {
            "model": self.model,
            "dtype": self.dtype,
            "press": press,
            "tells_entries": tells_entries,
            "prompts": [_told(prompt, num_entries) for prompt in prompts],
        }
        progress = ProgressLine(sys.stderr, title, len(prompts) + 1)
        with tempfile.TemporaryDirectory() as folder:
            task, log = Path(folder) / "job.json", Path(folder) / "log"
            task.write_text(json.dumps(job))
            try:
                for line in _lines([self.python, "-P", *self.worker, str(task)], log, len(prompts) + 1):
                    progress(True)
                    yield json.loads(line)
            finally:
                progress.close()


def compression_ratio(num_read: int, num_entries: int) -> float:
    """Return the share to drop with which kvpress, which cuts `num_read · (1 − ratio)` down to an integer, keeps `num_entries`."""
    return max(0.0, 1 - (num_entries + 0.5) / num_read)


def _told(prompt: Prompt, num_entries: int | None) -> dict[str, Any]:
    return {
        "token_ids": prompt.token_ids.tolist(),
        "num_prefill_tokens": prompt.num_prefill_tokens,
        "max_tokens": prompt.max_tokens,
        "compression_ratio": 0.0
        if num_entries is None
        else compression_ratio(prompt.num_prefill_tokens, num_entries),
    }


def _lines(command: Sequence[str], log: Path, expected: int) -> Iterator[str]:
    """Yield the lines that a program prints. Raises `MeasurementError` if it fails, or says too little."""
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise MeasurementError(str(error)) from error
        number = 0
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    number += 1
                    yield line
            except GeneratorExit:
                process.kill()
                raise
    if process.returncode != 0 or number != expected:
        said = log.read_text(errors="replace").strip()[-1000:]
        raise MeasurementError(
            f"{command[0]} ended with {process.returncode} after {number} of {expected} lines: {said}"
        )

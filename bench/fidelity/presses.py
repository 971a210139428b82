"""Answers of NVIDIA's kvpress to the suite's prompts, with the budget of our slots and our scoring.

kvpress runs in another environment, by `bench/fidelity/kvpress_worker.py`. This module writes its job and
scores its answers.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.systems.system import ROOT, MeasurementError
from commands.eval.completer import Completion
from commands.eval.prompts import Prompt
from commands.eval.ruler import task_scores
from commands.eval.run import Run
from commands.shared.progress import ProgressLine
from server.text.tokenizer import Tokenizer

WORKER = (str(ROOT / "bench" / "fidelity" / "kvpress_worker.py"),)


@dataclass(frozen=True, slots=True)
class NamedSetting:
    """A policy by its name in a comparison."""

    policy: str
    compression: float | None
    is_control: bool = False

    @property
    def label(self) -> str:
        return self.policy if self.compression is None else f"{self.policy} {self.compression:g}x"


@dataclass(frozen=True, slots=True)
class Kvpress:
    """A Python with kvpress, the model's folder, and the worker that this Python runs."""

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
        all_prompts = [prompt for of_task in prompts.values() for prompt in of_task]
        num_entries = None if setting.compression is None else int(length / setting.compression)
        lines = self.answers(press, all_prompts, num_entries, title=setting.label)
        header = next(lines)
        answers = [line["token_ids"] for line in lines]
        completions = iter(
            [Completion(tokenizer.decode(token_ids), len(token_ids), len(token_ids)) for token_ids in answers]
        )
        tasks = {
            name: task_scores(of_task, [next(completions) for _ in of_task])
            for name, of_task in prompts.items()
        }
        return Run(setting, (header["press"], *header["versions"]), tasks)

    def answers(
        self,
        press: str | None,
        prompts: Sequence[Prompt],
        num_entries: int | None,
        *,
        title: str,
        reports_entries: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Yield the worker's lines: its header, then one for each prompt. Raises `MeasurementError`."""
        job = {
            "model": self.model,
            "dtype": self.dtype,
            "press": press,
            "reports_entries": reports_entries,
            "prompts": [_job_entry(prompt, num_entries) for prompt in prompts],
        }
        progress = ProgressLine(sys.stderr, title, len(prompts) + 1)
        with tempfile.TemporaryDirectory() as folder:
            job_path = Path(folder) / "job.json"
            log = Path(folder) / "log"
            job_path.write_text(json.dumps(job))
            try:
                for line in _lines([self.python, "-P", *self.worker, str(job_path)], log, len(prompts) + 1):
                    progress(True)
                    yield json.loads(line)
            finally:
                progress.close()


def compression_ratio(num_read: int, num_entries: int) -> float:
    """Return the ratio with which kvpress keeps `num_entries`: it keeps ⌊num_read · (1 − ratio)⌋ entries."""
    return max(0.0, 1 - (num_entries + 0.5) / num_read)


def _job_entry(prompt: Prompt, num_entries: int | None) -> dict[str, Any]:
    ratio = 0.0 if num_entries is None else compression_ratio(prompt.num_prefill_tokens, num_entries)
    return {
        "token_ids": prompt.token_ids.tolist(),
        "num_prefill_tokens": prompt.num_prefill_tokens,
        "max_tokens": prompt.max_tokens,
        "compression_ratio": ratio,
    }


def _lines(command: Sequence[str], log: Path, expected: int) -> Iterator[str]:
    """Yield the lines that a program prints. Raises `MeasurementError` if it fails or lines are missing."""
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise MeasurementError(str(error)) from error
        num_lines = 0
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    num_lines += 1
                    yield line
            except GeneratorExit:
                process.kill()
                raise
    if process.returncode != 0 or num_lines != expected:
        output = log.read_text(errors="replace").strip()[-1000:]
        raise MeasurementError(
            f"{command[0]} ended with {process.returncode} after {num_lines} of {expected} lines: {output}"
        )

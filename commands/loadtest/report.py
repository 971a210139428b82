"""The figures of a run, under the field names of `vllm bench serve`."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commands.loadtest.answer import Answer, Failure
from commands.loadtest.run import Run

METRICS = ("ttft", "tpot", "itl", "e2el")

Figure = float | int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run.

    `figures` are by name, None where nothing was measured. `samples` are the latencies in milliseconds by
    metric. `failures` counts failed requests by reason, and `examples` has one message for each reason.
    """

    figures: Mapping[str, Figure]
    failures: Mapping[str, int]
    examples: Mapping[str, str]
    samples: Mapping[str, Sequence[float]]

    @property
    def has_failures(self) -> bool:
        return bool(self.failures)

    def as_json(self) -> dict[str, object]:
        return {**self.figures, "failures": dict(self.failures), "failure_examples": dict(self.examples)}


def make_report(run: Run, percentiles: Sequence[float]) -> Report:
    """Return the figures of a run. Failed requests are counted; they enter no other figure."""
    answers = [outcome for outcome in run.outcomes if isinstance(outcome, Answer)]
    failures = [outcome for outcome in run.outcomes if isinstance(outcome, Failure)]
    samples = latencies(answers)
    figures = _totals(answers, len(failures), run.duration)
    for metric in METRICS:
        figures |= _spread(metric, samples[metric], percentiles)
    return Report(
        figures,
        Counter(failure.reason for failure in failures),
        {failure.reason: failure.detail for failure in reversed(failures)},
        samples,
    )


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return the milliseconds of every metric: one for each answer, for `itl` one for each gap."""
    return {
        "ttft": [1000 * answer.ttft for answer in answers if answer.ttft is not None],
        "tpot": [1000 * answer.tpot for answer in answers if answer.tpot is not None],
        "itl": [1000 * gap for answer in answers for gap in answer.itls],
        "e2el": [1000 * answer.e2el for answer in answers],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _totals(answers: Sequence[Answer], num_failed: int, duration: float) -> dict[str, Figure]:
    num_input = sum(answer.num_input_tokens for answer in answers)
    num_output = sum(answer.num_output_tokens for answer in answers)
    return {
        "duration": duration,
        "completed": len(answers),
        "failed": num_failed,
        "without_text": sum(not answer.contents for answer in answers),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answers) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }


def _spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Figure]:
    return {
        f"mean_{metric}_ms": statistics.fmean(values) if values else None,
        f"median_{metric}_ms": statistics.median(values) if values else None,
        f"std_{metric}_ms": statistics.pstdev(values) if values else None,
        **{
            f"p{percent:g}_{metric}_ms": percentile(values, percent) if values else None
            for percent in percentiles
        },
    }

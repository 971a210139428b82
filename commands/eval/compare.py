"""`snapserve eval compare`: the differences of two runs over the same cases, paired by case."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.eval.statistics import Interval, bootstrap_interval, mean_of_means
from commands.shared.table import table
from server.options.command_line import OptionError

# Two runs have the same cases only if these facts are equal.
_CASE_FACTS = (
    *("suite", "seed", "length", "num_cases", "pack", "chat_template"),
    *("haystack_sha256", "question_position", "trailing_tokens", "turns", "answer_prefix"),  # of prose
    *("data_sha256", "max_tokens", "num_samples", "temperature", "top_p"),  # of published benchmarks
)
_MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean scores of two runs and the 95 % interval of second minus first, in points."""

    first: float
    second: float
    interval: Interval

    @property
    def points(self) -> float:
        return self.second - self.first

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences by task, then the difference of the means."""

    labels: tuple[str, str]
    differences: Mapping[str, Difference]

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.labels[0],
            "second": self.labels[1],
            "differences": {
                name: {
                    "first": difference.first,
                    "second": difference.second,
                    "difference": difference.points,
                    "interval": difference.interval,
                }
                for name, difference in self.differences.items()
            },
        }

    def table(self) -> str:
        rows = [
            [
                name,
                f"{difference.first:.1f}",
                f"{difference.second:.1f}",
                f"{difference.points:+.1f}",
                f"{difference.interval[0]:+.1f} to {difference.interval[1]:+.1f}",
                "*" if difference.is_significant else "",
            ]
            for name, difference in self.differences.items()
        ]
        text = table(["", *self.labels, "difference", "95 % interval", ""], rows)
        return f"{text}\n\nPaired bootstrap over cases; * marks intervals without zero."


def compare(first: str, second: str) -> Comparison:
    """Compare two runs, each given as `FILE` or `FILE#LABEL`.

    Raises `OptionError` for a file that is no result, and for runs over different cases.
    """
    first_run, first_file = _read(first)
    second_run, second_file = _read(second)
    for name in _CASE_FACTS:
        if first_file.get(name) != second_file.get(name):
            raise OptionError(
                f"the runs differ in {name}: {first_file.get(name)} and {second_file.get(name)}; "
                "their cases cannot be paired"
            )
    if first_run["tasks"].keys() != second_run["tasks"].keys():
        raise OptionError(
            f"the runs differ in tasks: {', '.join(first_run['tasks'])} and "
            f"{', '.join(second_run['tasks'])}; their cases cannot be paired"
        )
    first_scores = _scores_by_task(first_run)
    second_scores = _scores_by_task(second_run)
    changes: dict[str, list[float]] = {}
    differences: dict[str, Difference] = {}
    for name, scores in first_scores.items():
        others = second_scores[name]
        if len(scores) != len(others):
            raise OptionError(
                f"the runs differ in cases of {name}: {len(scores)} and {len(others)}; one was not finished"
            )
        changes[name] = [other - score for score, other in zip(scores, others, strict=True)]
        interval = bootstrap_interval([changes[name]])
        differences[name] = Difference(mean_of_means([scores]), mean_of_means([others]), interval)
    differences[_MEAN] = Difference(
        mean_of_means(list(first_scores.values())),
        mean_of_means(list(second_scores.values())),
        bootstrap_interval(list(changes.values())),
    )
    return Comparison((first_run["label"], second_run["label"]), differences)


def _scores_by_task(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: task["scores"] for name, task in run["tasks"].items()}


def _read(run_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run `FILE#LABEL` and the whole document of its file."""
    path, _, label = run_name.partition("#")
    try:
        file = json.loads(Path(path).read_text())
        runs = {run["label"]: run for run in file["runs"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionError(f"{path} is no result of `snapserve eval --json`: {error}") from error
    if label not in runs and (label or len(runs) != 1):
        raise OptionError(f"{path} has the runs {', '.join(runs)}: name one as {path}#LABEL")
    return runs[label] if label else next(iter(runs.values())), file

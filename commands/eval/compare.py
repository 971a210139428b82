"""`snapserve eval compare`: two runs over the same cases, their differences case by case."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.eval.statistics import Interval, bootstrap_interval, mean_of_means
from commands.shared.table import table
from server.options.command_line import OptionError

_SAME = (
    *("suite", "seed", "length", "num_cases", "pack", "chat_template"),
    *("data_sha256", "max_tokens", "num_samples", "temperature", "top_p"),  # of published benchmarks
)
_MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Difference:
    """Second minus first, in points, with its 95 % interval."""

    first: float
    second: float
    interval: Interval

    @property
    def points(self) -> float:
        return self.second - self.first

    @property
    def is_clear(self) -> bool:
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences by task, then that of the means."""

    labels: tuple[str, str]
    differences: Mapping[str, Difference]

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.labels[0],
            "second": self.labels[1],
            "differences": {
                name: {
                    "first": each.first,
                    "second": each.second,
                    "difference": each.points,
                    "interval": each.interval,
                }
                for name, each in self.differences.items()
            },
        }

    def table(self) -> str:
        rows = [
            [
                name,
                f"{each.first:.1f}",
                f"{each.second:.1f}",
                f"{each.points:+.1f}",
                _shown(each.interval),
                "*" if each.is_clear else "",
            ]
            for name, each in self.differences.items()
        ]
        text = table(["", *self.labels, "difference", "95 % interval", ""], rows)
        return f"{text}\n\nPaired bootstrap over cases; * marks intervals without zero."


def compare(first: str, second: str) -> Comparison:
    """Compare two runs, each `FILE` or `FILE#LABEL`. Raises `OptionError` for what is no run, or for runs over other cases."""
    (one, one_file), (other, other_file) = _read(first), _read(second)
    for name in _SAME:
        if one_file.get(name) != other_file.get(name):
            raise OptionError(
                f"the runs differ in {name}: {one_file.get(name)} and {other_file.get(name)}; there is nothing to pair"
            )
    if one["tasks"].keys() != other["tasks"].keys():
        raise OptionError(
            f"the runs differ in tasks: {', '.join(one['tasks'])} and {', '.join(other['tasks'])}; there is nothing to pair"
        )
    pairs = {name: (one["tasks"][name]["scores"], other["tasks"][name]["scores"]) for name in one["tasks"]}
    for name, (a, b) in pairs.items():
        if len(a) != len(b):
            raise OptionError(
                f"the runs differ in cases of {name}: {len(a)} and {len(b)}; one was not finished"
            )
    changes = {name: [b - a for a, b in zip(*scores, strict=True)] for name, scores in pairs.items()}
    differences = {
        name: Difference(mean_of_means([a]), mean_of_means([b]), bootstrap_interval([changes[name]]))
        for name, (a, b) in pairs.items()
    }
    means = [mean_of_means([scores[side] for scores in pairs.values()]) for side in (0, 1)]
    differences[_MEAN] = Difference(means[0], means[1], bootstrap_interval(list(changes.values())))
    return Comparison((one["label"], other["label"]), differences)


def _read(place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run, and the file that it is from."""
    path, _, label = place.partition("#")
    try:
        file = json.loads(Path(path).read_text())
        runs = {run["label"]: run for run in file["runs"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionError(f"{path} is no result of `snapserve eval --json`: {error}") from error
    if label not in runs and (label or len(runs) != 1):
        raise OptionError(f"{path} has the runs {', '.join(runs)}: name one as {path}#LABEL")
    return runs[label] if label else next(iter(runs.values())), file


def _shown(interval: Interval) -> str:
    return f"{interval[0]:+.1f} to {interval[1]:+.1f}"

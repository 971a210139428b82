"""Results as pictures: scores over compression, and predictions along a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands.eval.run import Run
from commands.eval.statistics import Interval, mean_interval, score_interval
from server.options.command_line import OptionError

_COLUMNS = 4


def plot_scores(runs: Sequence[Run], path: Path) -> None:
    """Draw the mean and every task's score over compression, a line a policy. Raises `OptionError`."""
    from matplotlib.figure import Figure

    names = ["mean", *runs[0].tasks]
    num_rows = -(-len(names) // _COLUMNS)
    figure = Figure(figsize=(3.4 * _COLUMNS, 2.6 * num_rows), layout="constrained")
    grid = list(figure.subplots(num_rows, _COLUMNS, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        _draw(axes, runs, name)
        axes.set(title=name, ylim=(-3, 103))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.grid(alpha=0.3)
    for axes in grid[len(names) :]:
        axes.remove()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1)
    figure.suptitle("Score over compression: prompt tokens for each entry of a slot")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture. Raises `OptionError`."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {path} cannot be written: {error}") from error


def _point(run: Run, name: str) -> tuple[float, Interval]:
    if name == "mean":
        return run.mean, mean_interval([task.scores for task in run.tasks.values()])
    return run.tasks[name].mean, score_interval(run.tasks[name].scores)


def _draw(axes: Any, runs: Sequence[Run], name: str) -> None:
    lines: dict[str, list[tuple[float | None, float, Interval]]] = {}
    for run in runs:
        label = run.setting.label if run.setting.compression is None else str(run.setting.policy)
        lines.setdefault(label, []).append((run.setting.compression, *_point(run, name)))
    for number, (label, points) in enumerate(lines.items()):
        if points[0][0] is None:
            axes.axhline(points[0][1], label=label, color=f"C{number}", linestyle="--")
            continue
        ratios, means, intervals = zip(*sorted(points), strict=True)
        errors = [
            [abs(mean - interval[side]) for mean, interval in zip(means, intervals, strict=True)]
            for side in (0, 1)
        ]
        axes.errorbar(ratios, means, yerr=errors, label=label, color=f"C{number}", marker="o", capsize=2)

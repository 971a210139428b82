"""The plot of a suite: scores over compression."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands.eval.run import Run
from commands.eval.statistics import Interval, mean_interval, score_interval
from commands.shared.files import save_plot

_COLUMNS = 4


def plot_scores(runs: Sequence[Run], path: Path) -> None:
    """Draw the mean and each task's score over compression, one line for each policy.

    Raises `OptionError` for a file that cannot be written.
    """
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
    figure.suptitle("Score over compression (prompt tokens per slot entry)")
    save_plot(figure, path)


def _point(run: Run, name: str) -> tuple[float, Interval]:
    if name == "mean":
        return run.mean, mean_interval([task.scores for task in run.tasks.values()])
    return run.tasks[name].mean, score_interval(run.tasks[name].scores)


def _draw(axes: Any, runs: Sequence[Run], name: str) -> None:
    """Draw a line with error bars for each policy, and a dashed line for a run without a compression."""
    lines: dict[str, list[tuple[float | None, float, Interval]]] = {}
    for run in runs:
        label = run.setting.label if run.setting.compression is None else str(run.setting.policy)
        lines.setdefault(label, []).append((run.setting.compression, *_point(run, name)))
    for index, (label, points) in enumerate(lines.items()):
        if points[0][0] is None:
            axes.axhline(points[0][1], label=label, color=f"C{index}", linestyle="--")
            continue
        compressions, means, intervals = zip(*sorted(points), strict=True)
        errors = [
            [abs(mean - interval[bound]) for mean, interval in zip(means, intervals, strict=True)]
            for bound in (0, 1)
        ]
        axes.errorbar(compressions, means, yerr=errors, label=label, color=f"C{index}", marker="o", capsize=2)

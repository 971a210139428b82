"""The plot of `snapserve bench`: the cumulative distribution of each latency."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from commands.loadtest.report import METRICS
from commands.shared.files import save_plot


def plot(samples: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw the distribution of each metric, one line for each server.

    `samples` are milliseconds by server and metric. Raises `OptionError` for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, metric in zip(figure.subplots(2, 2).flat, METRICS, strict=True):
        for index, (name, metrics) in enumerate(samples.items()):
            if metrics[metric]:
                axes.ecdf(metrics[metric], label=name, color=f"C{index}")
        axes.set(title=metric.upper(), xlabel="ms", ylabel="share", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names) or 1)
    save_plot(figure, path)

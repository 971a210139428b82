"""Results as a picture: for each latency, the share of requests (of gaps, for ITL) that stayed below it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from commands.loadtest.report import METRICS
from server.options.command_line import OptionError


def plot(samples: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw the distributions of every server's latencies, by the server's name and then the metric's. Raises `OptionError`."""
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
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {path} cannot be written: {error}") from error

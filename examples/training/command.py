"""The command line of the recipes, and the plot of the learning curve."""

import argparse
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from examples.training.trainer import Point, Trainer


def training_parser(description: str | None, threads: int) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all recipes have; `threads` is the default of --threads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the checkpoint, the curve and model/, the exported model",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=threads)
    return parser


def train(make: Callable[[], Trainer[Any, Any, Any]], arguments: argparse.Namespace) -> list[Point]:
    """Make a trainer, train from the start or from the last checkpoint, and return the curve."""
    torch.set_num_threads(arguments.threads)
    trainer = make()
    if arguments.resume:
        trainer.restore()
    trainer.save()  # a folder that cannot be written fails here, before the first step
    trainer.run()
    curve: list[Point] = trainer.progress.curve
    return curve


def draw_curve(
    curve: list[Point], series: Mapping[str, Mapping[int, float]], ylabel: str, path: Path
) -> None:
    """Draw series (label to values by tokens seen) over the tokens seen, with the borders of the stages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    for label, values in series.items():
        axes.plot([tokens / 1e6 for tokens in values], list(values.values()), label=label)
    for before, after in pairwise(curve):
        if before["stage"] != after["stage"]:
            axes.axvline(after["tokens"] / 1e6, color="lightgray", linewidth=0.8, zorder=0)
    axes.set(xlabel="tokens seen (millions)", ylabel=ylabel, ylim=(0, 1.02))
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

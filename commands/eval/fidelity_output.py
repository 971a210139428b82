"""The table and the plot of `snapserve eval fidelity`."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from commands.eval.fidelity import Fidelity, FidelityResult
from commands.shared.files import save_plot
from commands.shared.table import table

_NUM_BINS = 8


def fidelity_table(result: FidelityResult) -> str:
    """Return a row for each setting: first over the whole text, then by position in the text."""
    config = result.config
    header = (
        f"{result.model_id}: {result.num_windows} windows of text, packed after {config.length} tokens, "
        f"with {config.num_scored} predictions each from the packed slot, against policy full"
    )
    rows = []
    for run in result.runs:
        values = run.as_json()
        rows.append(
            [
                run.setting.label,
                f"{values['kl']:.4f}",
                f"{100 * values['top1_agreement']:.1f} %",
                f"{values['perplexity']:.3f}",
                f"{values['full_perplexity']:.3f}",
            ]
        )
    summary = table(["", "KL (nats)", "same top-1", "perplexity", "perplexity of full"], rows)
    edges = _edges(config.num_scored)
    spans = [f"{low + 1}–{high}" for low, high in pairwise(edges)]
    by_position = [[run.setting.label, *_binned(run, edges)] for run in result.runs]
    return "\n".join((header, "", summary, "", table(["KL (nats), same top-1 at", *spans], by_position)))


def plot_fidelity(result: FidelityResult, path: Path) -> None:
    """Draw KL divergence and top-1 agreement by position, one line for each setting.

    Raises `OptionError` for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for run in result.runs:
        above.plot(*_smoothed(run.kl.mean(0)), label=run.setting.label)
        below.plot(*_smoothed(100 * run.agrees.mean(0)), label=run.setting.label)
    above.set(
        ylabel="KL divergence (nats)", title="Next-token predictions of packed slots against policy full"
    )
    above.set_ylim(bottom=0)
    below.set(
        ylabel="same likeliest token (%)",
        ylim=(0, 101),
        xlabel=f"tokens after the slot was packed at {result.config.length}",
    )
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    save_plot(figure, path)


def _edges(num_scored: int) -> list[int]:
    """Return the edges of at most 8 bins of nearly equal width."""
    return sorted({num_scored * index // _NUM_BINS for index in range(_NUM_BINS + 1)})


def _binned(run: Fidelity, edges: list[int]) -> list[str]:
    return [
        f"{run.kl[:, low:high].mean():.3f} {100 * run.agrees[:, low:high].mean():.0f} %"
        for low, high in pairwise(edges)
    ]


def _smoothed(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[list[float], list[float]]:
    """Return the positions and values of a moving average over a sixteenth of the positions."""
    width = max(len(values) // 16, 1)
    averages = np.convolve(values, np.ones(width) / width, mode="valid")
    # Positions count from 1. The first average is at the middle of the first `width` positions.
    positions = [(width + 1) / 2 + index for index in range(len(averages))]
    return positions, averages.tolist()

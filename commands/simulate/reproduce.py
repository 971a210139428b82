"""`reproduce`: every published figure beside the simulated one, and the effect of two assumptions.

Figures that fitted a parameter are apart from those held out.
"""

from collections.abc import Sequence
from typing import Any

from backends.sn40l.assumptions import batches_without_reserve, expected_experts, pooled_sequences
from backends.sn40l.calibration import fit, parameters
from backends.sn40l.figures import Comparison, Machines, Role, compare
from backends.sn40l.hardware import MachineFile, load_machine_file
from backends.sn40l.model_config import load_model
from backends.sn40l.published import published_figures
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.options import ReproduceOptions


def reproduce_answer(options: ReproduceOptions) -> Answer:
    """Return every published figure beside the simulated one.

    The status is 1 if an unexpected one is missed.
    """
    files = {name: load_machine_file(name) for name in ("sn40l", "dgx-h100")}
    figures = published_figures()
    machines: Machines = (
        fit(figures, files) if options.fit else {name: file.machine for name, file in files.items()}
    )
    comparisons = compare(figures, machines)
    if options.plots:
        from backends.sn40l.plots import draw_figures

        draw_figures(options.plots, machines, comparisons)
    failed = [
        comparison.figure.key
        for comparison in comparisons
        if not comparison.is_met and (options.strict or not comparison.figure.miss)
    ]
    lines = [
        *_figure_lines(comparisons),
        "",
        *_parameter_lines(files, machines),
        "",
        *_assumption_lines(files),
        "",
        _verdict(comparisons),
    ]
    values = {
        "figures": [_figure_values(comparison) for comparison in comparisons],
        "failed": failed,
    }
    return Answer(lines, values, status=1 if failed else 0)


def _figure_lines(comparisons: Sequence[Comparison]) -> list[str]:
    header = ("figure", "published", "simulated", "unit", "error", "tolerance", "", "source and note")
    lines: list[str] = []
    for role, meaning in _MEANINGS.items():
        rows = [_figure_cells(comparison) for comparison in comparisons if comparison.figure.role is role]
        lines += [f"{meaning} ({len(rows)} figures)", "", table(header, rows), ""]
    return lines[:-1]


_MEANINGS = {
    Role.FITTED: "Fitted: each figure fixes one parameter",
    Role.IMPLIED: "Implied: these figures follow, or nearly follow, from fitted ones",
    Role.HELD_OUT: "Held out",
}


def _figure_cells(comparison: Comparison) -> tuple[str, ...]:
    figure = comparison.figure
    state = "ok" if comparison.is_met else ("known miss" if figure.miss else "MISS")
    reason = figure.miss if figure.miss and not comparison.is_met else figure.note
    return (
        figure.key,
        figure.published,
        f"{comparison.ours:.4g}",
        figure.unit,
        f"{comparison.error:+.2f}" if figure.is_absolute else f"{comparison.error:+.1%}",
        f"{figure.tolerance:g}" if figure.is_absolute else f"{figure.tolerance:.0%}",
        state,
        f"{figure.source}; {reason}" if reason else figure.source,
    )


def _figure_values(comparison: Comparison) -> dict[str, Any]:
    figure = comparison.figure
    return {
        "figure": figure.key,
        "source": figure.source,
        "unit": figure.unit,
        "published": figure.published,
        "simulated": comparison.ours,
        "error": comparison.error,
        "tolerance": figure.tolerance,
        "role": figure.role,
        "fits": figure.fits,
        "is_met": comparison.is_met,
        "known_miss": figure.miss or None,
    }


def _parameter_lines(files: dict[str, MachineFile], machines: Machines) -> list[str]:
    rows = [
        (
            f"{parameter.machine}.{parameter.name}",
            f"{getattr(machines[parameter.machine], parameter.name):.4g}",
            f"{parameter.low:g} to {parameter.high:g}",
            parameter.figure.key,
        )
        for parameter in parameters(published_figures(), files)
    ]
    return ["Fitted parameters", "", table(("parameter", "value", "range", "fixed by"), rows)]


def _assumption_lines(files: dict[str, MachineFile]) -> list[str]:
    machine = files["sn40l"].machine
    model = load_model("deepseek-r1")
    rows = [
        (
            comparison.figure.key,
            comparison.figure.published,
            f"{comparison.ours:.4g}",
            f"{comparison.error:+.1%}",
        )
        for comparison in expected_experts(files).comparisons
    ]
    batches = [
        (f"{capacity:,}", str(published), str(ours))
        for capacity, (ours, published) in batches_without_reserve(machine).items()
    ]
    pooled = pooled_sequences(machine, model.weight_bytes, model.cache_bytes(131072), 16)
    return [
        "Two assumptions about DeepSeek-R1, and what the figures would be without them",
        "",
        "1. A static graph's expert loop has an iteration for every expert that its batch could choose,",
        "   min(experts, batch × chosen), and reads the weights of each. With the expected number of chosen",
        "   experts instead (fitted anew):",
        "",
        table(("figure", "published", "simulated", "error"), rows),
        "",
        "2. A tenth of HBM is reserved, and a batch is a power of two. Without the reserve:",
        "",
        table(("entries", "published batch", "simulated batch"), batches),
        "",
        f"   If the HBM of all sockets were one memory, it would hold {pooled} sequences of 128k.",
    ]


def _verdict(comparisons: Sequence[Comparison]) -> str:
    held_out = [comparison for comparison in comparisons if comparison.figure.role is Role.HELD_OUT]
    num_met = sum(comparison.is_met for comparison in held_out)
    num_known = sum(not comparison.is_met and bool(comparison.figure.miss) for comparison in comparisons)
    num_others = sum(not comparison.is_met for comparison in comparisons) - num_known
    return (
        f"{num_met} of {len(held_out)} held-out figures within tolerance; "
        f"of all {len(comparisons)}, {num_known} known misses and {num_others} others"
    )

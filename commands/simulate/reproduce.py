"""`reproduce`: every published figure beside ours, fitted ones apart from those held out, and what two assumptions are worth."""

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
    """Every published figure beside ours."""
    files = {name: load_machine_file(name) for name in ("sn40l", "dgx-h100")}
    figures = published_figures()
    machines: Machines = (
        fit(figures, files) if options.fit else {name: file.machine for name, file in files.items()}
    )
    comparisons = compare(figures, machines)
    if options.plots:
        from backends.sn40l.plots import draw_figures

        draw_figures(options.plots, machines, comparisons)
    failed = [c for c in comparisons if not c.is_met and (options.strict or not c.figure.miss)]
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
        "failed": [c.figure.key for c in failed],
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
    Role.FITTED: "Fitted: each fixes one parameter",
    Role.IMPLIED: "Implied: they follow from fitted ones, or nearly",
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
            f"{p.machine}.{p.name}",
            f"{getattr(machines[p.machine], p.name):.4g}",
            f"{p.low:g} to {p.high:g}",
            p.figure.key,
        )
        for p in parameters(published_figures(), files)
    ]
    return ["Fitted parameters", "", table(("parameter", "value", "range", "fixed by"), rows)]


def _assumption_lines(files: dict[str, MachineFile]) -> list[str]:
    machine, model = files["sn40l"].machine, load_model("deepseek-r1")
    rows = [
        (c.figure.key, c.figure.published, f"{c.ours:.4g}", f"{c.error:+.1%}")
        for c in expected_experts(files).comparisons
    ]
    batches = [
        (f"{capacity:,}", str(published), str(ours))
        for capacity, (ours, published) in batches_without_reserve(machine).items()
    ]
    pooled = pooled_sequences(machine, model.weight_bytes, model.cache_bytes(131072), 16)
    return [
        "Two assumptions about DeepSeek-R1, and what the figures would be without them",
        "",
        "1. A static graph's expert loop has a trip for every expert that its batch could choose, min(experts, batch × chosen), and reads",
        "   them all. With the experts that are expected to be touched instead (fitted anew):",
        "",
        table(("figure", "published", "simulated", "error"), rows),
        "",
        "2. A tenth of HBM is kept free and a batch is a power of two. With nothing kept free:",
        "",
        table(("entries", "published batch", "simulated batch"), batches),
        "",
        f"   If all sockets' HBM were one memory, it would hold {pooled} sequences of 128k.",
    ]


def _verdict(comparisons: Sequence[Comparison]) -> str:
    held_out = [comparison for comparison in comparisons if comparison.figure.role is Role.HELD_OUT]
    met = sum(comparison.is_met for comparison in held_out)
    known = sum(not comparison.is_met and bool(comparison.figure.miss) for comparison in comparisons)
    others = sum(not comparison.is_met for comparison in comparisons) - known
    return f"{met} of {len(held_out)} held-out figures within tolerance; of all {len(comparisons)}, {known} known misses and {others} others"

"""`reproduce`: every published figure beside the simulated one, and the effect of two assumptions.

Only predictions test the model: inputs, arithmetic and what is fitted are apart.
"""

from collections.abc import Sequence
from typing import Any

from backends.sn40l.description.hardware import MachineFile, load_machine_file
from backends.sn40l.description.model_config import load_model
from backends.sn40l.evidence.assumptions import batches_without_reserve, expected_experts, pooled_sequences
from backends.sn40l.evidence.calibration import fit, parameters
from backends.sn40l.evidence.figures import Figure, Machines
from backends.sn40l.evidence.judgement import Evidence, Kind, judge
from backends.sn40l.evidence.published import MACHINES as FIGURE_MACHINES
from backends.sn40l.evidence.published import left_out, published_figures
from commands.shared.table import table
from commands.simulate.answer import Answer
from commands.simulate.options import ReproduceOptions


def reproduce_answer(options: ReproduceOptions) -> Answer:
    """Return every published figure beside the simulated one, in three lists.

    The status is 1 if a prediction failed.
    """
    files = {name: load_machine_file(name) for name in FIGURE_MACHINES}
    figures = published_figures()
    machines: Machines = (
        fit(figures, files) if options.fit else {name: file.machine for name, file in files.items()}
    )
    evidence = judge(figures, files, machines)
    if options.plots:
        from backends.sn40l.plots import draw_figures

        draw_figures(options.plots, machines, evidence)
    failed = [one.figure.key for one in evidence if one.is_failed]
    lines = [
        *(line for kind in Kind for line in _list_lines(kind, evidence)),
        *_parameter_lines(files, machines),
        "",
        *_assumption_lines(files),
        "",
        "Published, but not computed",
        "",
        table(("figure", "why"), list(left_out().items())),
        "",
        _verdict(evidence),
    ]
    values = {
        "figures": [_figure_values(one) for one in evidence],
        "failed": failed,
        "left_out": dict(left_out()),
    }
    return Answer(lines, values, status=1 if failed else 0)


_TITLES = {
    Kind.ARITHMETIC: "Inputs and arithmetic: nothing unpublished moves them out of their tolerance",
    Kind.FITTED: "Fitted: by a parameter, by a choice, or met by a null model",
    Kind.PREDICTION: "Predictions",
}


def _list_lines(kind: Kind, evidence: Sequence[Evidence]) -> list[str]:
    shown = [one for one in evidence if one.kind is kind]
    last = "errors of null models" if kind is Kind.PREDICTION else "why it is no prediction"
    header = ("figure", "published", "simulated", "range", "unit", "error", "tolerance", "", last)
    rows = [_figure_cells(one) for one in shown]
    sources = [f"  {one.figure.key}: {_source(one)}" for one in shown]
    return [f"{_TITLES[kind]} ({len(shown)} figures)", "", table(header, rows), "", *sources, ""]


def _figure_cells(one: Evidence) -> tuple[str, ...]:
    figure = one.figure
    nulls = ", ".join(f"{name} {_error(figure, figure.error(value))}" for name, value in one.nulls)
    return (
        figure.key,
        figure.published,
        f"{one.comparison.ours:.4g}",
        f"{one.low:.3g} to {one.high:.3g}",
        figure.unit,
        _error(figure, one.comparison.error),
        f"{figure.tolerance:g}" if figure.is_absolute else f"{figure.tolerance:.0%}",
        "ok" if one.comparison.is_met else "MISS",
        nulls if one.kind is Kind.PREDICTION else one.reason,
    )


def _error(figure: Figure, error: float) -> str:
    return f"{error:+.2f}" if figure.is_absolute else f"{error:+.1%}"


def _source(one: Evidence) -> str:
    figure = one.figure
    remarks = (figure.source, figure.note, "" if one.comparison.is_met else figure.miss)
    return "; ".join(remark for remark in remarks if remark)


def _figure_values(one: Evidence) -> dict[str, Any]:
    figure = one.figure
    return {
        "figure": figure.key,
        "source": figure.source,
        "unit": figure.unit,
        "published": figure.published,
        "simulated": one.comparison.ours,
        "range": [one.low, one.high],
        "error": one.comparison.error,
        "tolerance": figure.tolerance,
        "kind": one.kind,
        "reason": one.reason or None,
        "null_errors": {name: figure.error(value) for name, value in one.nulls},
        "is_met": one.comparison.is_met,
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


def _verdict(evidence: Sequence[Evidence]) -> str:
    predictions = [one for one in evidence if one.kind is Kind.PREDICTION]
    num_met = sum(one.comparison.is_met for one in predictions)
    return (
        f"{num_met} of {len(predictions)} predictions within tolerance; "
        f"{len(evidence) - len(predictions)} other figures test nothing"
    )

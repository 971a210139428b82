"""Plots of the simulator, for the docs and of a sweep. They need matplotlib, of the extra `bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.sn40l.comparison.sweep import SweepRow
from backends.sn40l.description.hardware import Machine
from backends.sn40l.description.model_config import load_model
from backends.sn40l.evidence.figures import Machines
from backends.sn40l.evidence.judgement import Evidence, Kind
from backends.sn40l.evidence.measures import (
    DENSE_MODELS,
    EXPERT_LAYER,
    TABLE_5,
    attained,
)
from backends.sn40l.step.decode import decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.kernels import Step
from backends.sn40l.step.trace import bandwidth

_OURS, _PUBLISHED, _PLAIN = "#1f6fb4", "#9aa5b1", "#d9822b"
_EXECUTION_COLORS = {Execution.OPERATORS: _PUBLISHED, Execution.FUSED: _PLAIN, Execution.LOOPED: _OURS}


def draw_figures(folder: Path, machines: Machines, evidence: Sequence[Evidence]) -> tuple[Path, ...]:
    """Draw every picture of the docs into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return (
        _bandwidth(folder / "bandwidth.png", machines),
        _table_5(folder / "table5.png", evidence),
        _prefill(folder / "prefill.png", evidence),
        _looping(folder / "looping.png", machines),
        _residuals(folder / "residuals.png", evidence),
    )


def draw_sweep(path: Path, rows: Sequence[SweepRow]) -> Path:
    """Draw tokens a second of the node over batch, a line for each combination of the other axes."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.option is not None:
            label = (
                f"{row.policy} {row.capacity:,}, context {row.context:,}, {row.num_sockets} sockets, "
                f"{row.execution}"
            )
            lines.setdefault(label, []).append((row.batch, row.option.rate))
    figure, axes = _subplots(9, 5)
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    batches = sorted({row.batch for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="slots", ylabel="tokens/s of the node")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.legend(fontsize=6)
    return _save(figure, axes, path, "Sweep")


def draw_bandwidth(path: Path, steps: Mapping[Execution, Step], machine: Machine, title: str) -> Path:
    """Draw the HBM traffic of the first half millisecond of steps."""
    figure, axes = _subplots(9, 3.5)
    interval = 1e-6
    shown = 500e-6
    for execution, step in steps.items():
        series = [rate / 1e12 for rate in bandwidth(step, interval)][: int(shown / interval)]
        times = [index * interval * 1e6 for index in range(len(series))]
        axes.step(times, series, color=_EXECUTION_COLORS[execution], label=execution, linewidth=0.9)
    peak = next(iter(steps.values())).num_sockets * machine.hbm_bandwidth / 1e12
    axes.axhline(peak, color=_PUBLISHED, linestyle="--", linewidth=0.8, label="peak")
    axes.set(xlabel="µs since the step's start", ylabel="HBM traffic, TB/s", ylim=(0, 1.1 * peak))
    axes.legend(loc="lower right", fontsize=8)
    return _save(figure, axes, path, title)


def draw_plan(
    path: Path, points: Sequence[tuple[float, float]], labels: Sequence[str], on_front: Sequence[bool]
) -> Path:
    """Draw each deployment's tokens/s of a socket over tokens/s for a user, and the Pareto front."""
    figure, axes = _subplots(9, 5)
    for (user, socket), label, is_best in zip(points, labels, on_front, strict=True):
        axes.scatter([user], [socket], color=_OURS if is_best else _PUBLISHED)
        axes.annotate(label, (user, socket), fontsize=6, xytext=(4, 4), textcoords="offset points")
    front = sorted(point for point, is_best in zip(points, on_front, strict=True) if is_best)
    axes.plot(*zip(*front, strict=True), color=_OURS, linewidth=0.8)
    axes.set(xlabel="tokens/s for a user", ylabel="tokens/s of a socket", ylim=(0, None), xlim=(0, None))
    return _save(figure, axes, path, "Deployments within the limits")


def draw_replay(path: Path, times: Sequence[float], waiting: Sequence[int], in_use: Sequence[int]) -> Path:
    """Draw the queue and the slots in use over a replay."""
    figure, axes = _subplots(9, 3.5)
    axes.plot(times, in_use, color=_OURS, label="slots in use")
    axes.plot(times, waiting, color=_PLAIN, label="waiting")
    axes.set(xlabel="seconds", ylabel="requests")
    axes.legend(fontsize=8)
    return _save(figure, axes, path, "Replay")


def _bandwidth(path: Path, machines: Machines) -> Path:
    steps = {
        execution: decode_step(
            Deployment(load_model("llama-3.1-8b"), machines["sn40l"], 16, execution), DecodeShape(1, 4096)
        )
        for execution in (Execution.FUSED, Execution.LOOPED)
    }
    return draw_bandwidth(
        path, steps, machines["sn40l"], "Llama 3.1 8B, batch 1, 16 sockets: layers as calls, and looped"
    )


def _table_5(path: Path, evidence: Sequence[Evidence]) -> Path:
    by_key = {one.figure.key: one for one in evidence}
    cells = [
        (f"{cell.entries // 1024}k × {cell.batch}", by_key[f"{cell.label}: rate"])
        for pair in TABLE_5
        for cell in pair
    ]
    figure, axes = _subplots(8, 3.5)
    _pairs(axes, cells)
    axes.set(xlabel="cache entries × slots", ylabel="tokens/s (×2.4)")
    return _save(figure, axes, path, "DeepSeek-R1 decode on 16 sockets (arXiv 2511.03092, table 5)")


def _prefill(path: Path, evidence: Sequence[Evidence]) -> Path:
    by_key = {one.figure.key: one for one in evidence}
    figure, axes = _subplots(8, 3.5)
    _pairs(axes, [(name, by_key[f"R1 prefill: {name}"]) for name in EXPERT_LAYER])
    axes.set(yscale="log", ylabel="% of a layer's prefill")
    return _save(
        figure, axes, path, "DeepSeek-R1 prefill of 128k, one expert layer (arXiv 2511.03092, table 4)"
    )


def _looping(path: Path, machines: Machines) -> Path:
    figure, axes = _subplots(8, 3.5)
    names = sorted(DENSE_MODELS, key=lambda name: load_model(name).num_params)
    for offset, execution in ((-0.2, Execution.FUSED), (0.2, Execution.LOOPED)):
        values = [attained(machines["sn40l"], name, 16, execution) for name in names]
        axes.bar(
            [position + offset for position in range(len(names))],
            values,
            0.4,
            color=_EXECUTION_COLORS[execution],
            label=execution,
        )
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set(ylabel="% of the roofline", ylim=(0, 100))
    axes.legend(fontsize=8)
    return _save(figure, axes, path, "Decode at batch 1 and 4k on 16 sockets")


def _residuals(path: Path, evidence: Sequence[Evidence]) -> Path:
    shown = [one for one in reversed(evidence) if not one.figure.is_absolute]
    figure, axes = _subplots(8, 0.16 * len(shown) + 1)
    colors = [_color(one) for one in shown]
    axes.scatter([100 * one.comparison.error for one in shown], range(len(shown)), c=colors, s=18)
    axes.set_yticks(range(len(shown)), [one.figure.key for one in shown], fontsize=6)
    axes.axvline(0, color=_PUBLISHED, linewidth=0.8)
    axes.set_ylim(-1, len(shown))
    axes.grid(axis="y", linewidth=0.2)
    axes.set(xlabel="error, %: predictions blue, beyond tolerance orange, all that tests nothing grey")
    return _save(figure, axes, path, "Every relative figure beside ours")


def _color(one: Evidence) -> str:
    if not one.comparison.is_met:
        return _PLAIN
    return _OURS if one.kind is Kind.PREDICTION else _PUBLISHED


def _pairs(axes: Any, cells: Sequence[tuple[str, Evidence]]) -> None:
    positions = range(len(cells))
    axes.bar(
        [position - 0.2 for position in positions],
        [one.figure.low for _, one in cells],
        0.4,
        color=_PUBLISHED,
        label="published",
    )
    axes.bar(
        [position + 0.2 for position in positions],
        [one.comparison.ours for _, one in cells],
        0.4,
        color=_OURS,
        label="simulated",
    )
    axes.set_xticks(positions, [name for name, _ in cells], fontsize=8)
    axes.legend(fontsize=8)


def _subplots(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib.figure  # not at the top: serving must not need it

    figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, axes: Any, path: Path, title: str) -> Path:
    axes.set_title(f"{title} — simulated", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    metadata: Mapping[str, str | None] = {"Software": None}  # the same picture at every run
    figure.savefig(path, dpi=110, metadata=metadata)
    return path

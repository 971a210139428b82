"""Which published figures test the model: inputs and arithmetic, fitted, and predictions.

A met figure is a prediction only if the model could have missed it, and if something simpler misses it:

- doubling or halving some unpublished parameter moves it out of its tolerance;
- no null model meets it: a constant, a line through fitted or sibling figures, one number of the machine,
  "no effect" or zero;
- its span is narrower than a factor of two;
- no fitted figure and no choice made with it in view determines it.

A figure that is missed stays a prediction, unless it is fitted or nothing unpublished enters it.
"""

import contextlib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.sn40l.description.hardware import MachineFile
from backends.sn40l.evidence.figures import Comparison, Figure, Machines, Null
from backends.sn40l.step.placement import DoesNotFitError

_WIDE = 2.0  # the upper end of a span over its lower end, from which on nearly every model meets it


class Kind(enum.StrEnum):
    """The list that a figure is in."""

    ARITHMETIC = "inputs and arithmetic"
    FITTED = "fitted"
    PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure beside ours and beside null models.

    `low` and `high` are the least and greatest values when one unpublished number of a machine at a time
    takes the ends of its range.
    """

    comparison: Comparison
    kind: Kind
    reason: str  # why it is no prediction
    nulls: tuple[Null, ...]
    low: float
    high: float

    @property
    def figure(self) -> Figure:
        return self.comparison.figure

    @property
    def is_failed(self) -> bool:
        """Whether it is a prediction that did not come out."""
        return self.kind is Kind.PREDICTION and not self.comparison.is_met


def judge(
    figures: Sequence[Figure], machine_files: Mapping[str, MachineFile], machines: Machines
) -> tuple[Evidence, ...]:
    """Return each figure with its kind. `machines` have the numbers, `machine_files` their ranges."""
    return tuple(_judge(figure, machine_files, machines) for figure in figures)


def _judge(figure: Figure, machine_files: Mapping[str, MachineFile], machines: Machines) -> Evidence:
    used = _Recorded(machines)
    comparison = Comparison(figure, figure.compute(used))

    def values(factors: Sequence[float]) -> list[float]:
        found: list[float] = []
        for name in sorted(used.names):
            for change in machine_files[name].changes(factors):
                # A reserve at which the slots do not fit says nothing about their speed.
                with contextlib.suppress(DoesNotFitError):
                    found.append(figure.compute({**machines, name: replace(machines[name], **change)}))
        return found

    nulls = (*figure.nulls, *_general_nulls(figure))
    moved = values((0.5, 2.0))
    kind, reason = _kind(comparison, moved, nulls)
    ends = [comparison.ours, *values(())]
    return Evidence(comparison, kind, reason, nulls, min(ends), max(ends))


def _kind(comparison: Comparison, moved: Sequence[float], nulls: Sequence[Null]) -> tuple[Kind, str]:
    figure = comparison.figure
    if figure.fits is not None:
        return Kind.FITTED, f"fits {figure.fits}"
    if figure.follows:
        return Kind.FITTED, figure.follows
    if all(abs(value - comparison.ours) <= 1e-9 * abs(comparison.ours) for value in moved):
        return Kind.ARITHMETIC, "no unpublished number enters"
    if not comparison.is_met:
        return Kind.PREDICTION, ""
    if figure.low > 0 and figure.high >= _WIDE * figure.low:
        return Kind.ARITHMETIC, "the span is too wide to be missed"
    if all(figure.is_met_by(value) for value in moved):
        return Kind.ARITHMETIC, "no parameter, doubled or halved, moves it out"
    for name, value in nulls:
        if figure.is_met_by(value):
            return Kind.FITTED, f"{name} meets it"
    return Kind.PREDICTION, ""


def _general_nulls(figure: Figure) -> tuple[Null, ...]:
    if figure.is_absolute:
        return (("zero", 0.0),)
    return (("no effect", 1.0),) if figure.unit == "×" else ()


class _Recorded(dict[str, Any]):
    """Machines that note which of them were looked up."""

    def __init__(self, machines: Machines) -> None:
        super().__init__(machines)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

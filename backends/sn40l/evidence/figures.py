"""Published figures: a value or a range, its source, and the function that computes ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.sn40l.description.hardware import Machine

Machines = Mapping[str, Machine]
Value = Callable[[Machines], float]
"""Computes our value of a figure, in its unit."""

Null = tuple[str, float]  # a value that needs none of the model, and its name


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure. `low` and `high` are equal for a value. `fits` is the parameter that it fits.

    `tolerance` is relative to the published value, or in its unit if `is_absolute`. `miss` explains why a
    figure is not met. `follows` says what determines the figure besides the model: a fitted figure, or a
    choice that was made with this figure in view. `nulls` are what a constant or a line through fitted
    figures gives.
    """

    key: str
    source: str
    unit: str
    low: float
    high: float
    compute: Value
    tolerance: float
    is_absolute: bool = False
    fits: str | None = None  # "machine.parameter"
    note: str = ""
    miss: str = ""
    follows: str = ""
    nulls: tuple[Null, ...] = ()

    @property
    def published(self) -> str:
        """The value or range as text."""
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"

    def error(self, ours: float) -> float:
        """Return the signed distance of `ours` from the figure, relative unless `is_absolute`.

        It is zero within a range.
        """
        nearest = min(max(ours, self.low), self.high)
        return ours - nearest if self.is_absolute or nearest == 0 else ours / nearest - 1

    def is_met_by(self, ours: float) -> bool:
        """Return whether a value is within the tolerance."""
        return abs(self.error(ours)) <= self.tolerance + 1e-9


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure beside ours."""

    figure: Figure
    ours: float

    @property
    def error(self) -> float:
        return self.figure.error(self.ours)

    @property
    def is_met(self) -> bool:
        return self.figure.is_met_by(self.ours)


def compare(figures: tuple[Figure, ...], machines: Machines) -> tuple[Comparison, ...]:
    """Compute every figure."""
    return tuple(Comparison(figure, figure.compute(machines)) for figure in figures)

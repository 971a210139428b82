"""Two servers loaded in turns: medians over the rounds, and ratios within each round.

Both servers of a round meet the machine in the same state, so slow phases of the machine cancel in a ratio.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commands.loadtest.report import Figure, Report


@dataclass(frozen=True, slots=True)
class Comparison:
    """The reports of both servers, one for each round."""

    base: list[Report]
    compare: list[Report]

    @property
    def reports(self) -> list[Report]:
        return [*self.base, *self.compare]

    @property
    def has_failures(self) -> bool:
        return any(report.has_failures for report in self.reports)

    def as_json(self) -> dict[str, object]:
        return {
            "rounds": len(self.base),
            "ratios": ratios(
                [report.figures for report in self.base], [report.figures for report in self.compare]
            ),
            **{
                name: {
                    "medians": medians([report.figures for report in reports]),
                    "runs": [report.as_json() for report in reports],
                }
                for name, reports in (("base", self.base), ("compare", self.compare))
            },
        }


def medians(rounds: Sequence[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Return each figure's median over the rounds in which it was measured."""
    return {name: _median([figures.get(name) for figures in rounds]) for name in rounds[0]}


def ratios(
    base: Sequence[Mapping[str, Figure]], compare: Sequence[Mapping[str, Figure]]
) -> dict[str, Figure]:
    """Return the median over the rounds of base / compare, for each figure that both servers have.

    It is None where no round has both figures and a divisor that is not 0.
    """
    pairs = list(zip(base, compare, strict=True))
    return {
        name: _median([_ratio(first.get(name), second.get(name)) for first, second in pairs])
        for name in base[0]
        if name in compare[0]
    }


def _ratio(dividend: Figure, divisor: Figure) -> Figure:
    return None if dividend is None or not divisor else dividend / divisor


def _median(values: Sequence[Figure]) -> Figure:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None

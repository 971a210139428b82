"""What the unpublished numbers of a machine leave open: values with one of them at an end of its range."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from backends.sn40l.step.deployment import Deployment
from backends.sn40l.step.placement import DoesNotFitError


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the greatest value, and the deployments that have them."""

    low: float
    high: float
    lowest: Deployment
    highest: Deployment


def value_range(
    deployment: Deployment, changes: Iterable[dict[str, Any]], value: Callable[[Deployment], float]
) -> Range:
    """Return the range of a value over the machine as it is and with each of the changes.

    A change with which the slots do not fit says nothing about their speed, and is left out.
    """
    found = [(value(deployment), deployment)]
    for change in changes:
        changed = replace(deployment, machine=replace(deployment.machine, **change))
        try:
            found.append((value(changed), changed))
        except DoesNotFitError:
            continue
    low, high = min(found, key=_first), max(found, key=_first)
    return Range(low[0], high[0], low[1], high[1])


def _first(pair: tuple[float, Deployment]) -> float:
    return pair[0]

"""Fits the unpublished parameters by Newton's method in logarithms, one published figure for each parameter.

The fitted figures are therefore met exactly. Their residuals only show that a solution exists within the
parameters' ranges. All other figures test the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.sn40l.description.hardware import Machine, MachineFile
from backends.sn40l.evidence.figures import Figure

_MAX_ROUNDS = 30
_CLOSE = 1e-5
_STEP = 1e-4


class CalibrationError(ArithmeticError):
    """No values of the parameters meet the fitted figures."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A fitted number of a machine, and the figure that determines it."""

    machine: str
    name: str
    low: float
    high: float
    figure: Figure


def parameters(
    figures: tuple[Figure, ...], machine_files: Mapping[str, MachineFile]
) -> tuple[Parameter, ...]:
    """Return the parameters that the figures name, with the ranges of their files.

    Raises CalibrationError for a published number.
    """
    found: list[Parameter] = []
    for figure in figures:
        if figure.fits is not None:
            machine, name = figure.fits.split(".")
            quantity = machine_files[machine].quantities[name]
            if quantity.low is None or quantity.high is None:
                raise CalibrationError(f"{figure.fits} is published, it is not to be fitted")
            found.append(Parameter(machine, name, quantity.low, quantity.high, figure))
    return tuple(found)


def fit(figures: tuple[Figure, ...], machine_files: Mapping[str, MachineFile]) -> dict[str, Machine]:
    """Return the machines with the fitted parameters. Raises CalibrationError if there is no solution."""
    machines = {name: file.machine for name, file in machine_files.items()}
    fitted = parameters(figures, machine_files)
    # In logarithms, parameters and figures stay positive, and errors are relative. Ranges may begin at 0.
    low = np.log([max(p.low, 1e-12) for p in fitted])
    high = np.log([p.high for p in fitted])
    point = np.log([_get(machines[p.machine], p.name) for p in fitted])
    for _ in range(_MAX_ROUNDS):
        residuals = _residuals(fitted, machines, point)
        if np.abs(residuals).max(initial=0.0) < _CLOSE:
            return _moved(fitted, machines, point)
        steps = np.linalg.solve(_jacobian(fitted, machines, point, residuals), residuals)
        # Far from the solution the derivatives mislead: no parameter changes by more than a factor of e^0.5
        # in a round.
        point = np.clip(point - np.clip(steps, -0.5, 0.5), low, high)
    worst = int(np.abs(residuals).argmax())
    raise CalibrationError(
        f"{fitted[worst].figure.key} stays {residuals[worst]:+.1%} off within the ranges of the parameters"
    )


def _residuals(
    fitted: tuple[Parameter, ...], machines: Mapping[str, Machine], point: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each figure's logarithm of computed over published, at a point [parameter]."""
    moved = _moved(fitted, machines, point)
    return np.log([parameter.figure.compute(moved) / parameter.figure.low for parameter in fitted])


def _jacobian(
    fitted: tuple[Parameter, ...],
    machines: Mapping[str, Machine],
    point: NDArray[np.float64],
    residuals: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the derivatives [figure, parameter] of the residuals, by differences."""
    columns = [
        (_residuals(fitted, machines, point + _STEP * unit) - residuals) / _STEP
        for unit in np.eye(len(point))
    ]
    return np.stack(columns, axis=1)


def _moved(
    fitted: tuple[Parameter, ...], machines: Mapping[str, Machine], point: NDArray[np.float64]
) -> dict[str, Machine]:
    """Return the machines with the parameters of a point."""
    moved = dict(machines)
    for parameter, value in zip(fitted, np.exp(point), strict=True):
        change: dict[str, Any] = {parameter.name: float(value)}
        moved[parameter.machine] = replace(moved[parameter.machine], **change)
    return moved


def _get(machine: Machine, name: str) -> float:
    value: float = getattr(machine, name)
    return value

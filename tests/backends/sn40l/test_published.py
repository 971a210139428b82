"""Published figures beside ours, and the fit behind the machine files."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backends.sn40l.assumptions import batches_without_reserve, expected_experts
from backends.sn40l.calibration import CalibrationError, fit, parameters
from backends.sn40l.figures import Comparison, Role, compare
from backends.sn40l.hardware import MachineFile, load_machine_file
from backends.sn40l.measures import MULTI_TOKEN, TABLE_5, table_5_rate
from backends.sn40l.published import published_figures
from backends.sn40l.published_r1 import decode_figures


@pytest.fixture(scope="module")
def files() -> dict[str, MachineFile]:
    return {name: load_machine_file(name) for name in ("sn40l", "dgx-h100")}


@pytest.fixture(scope="module")
def comparisons(files: Mapping[str, MachineFile]) -> dict[str, Comparison]:
    found = compare(published_figures(), {name: file.machine for name, file in files.items()})
    return {comparison.figure.key: comparison for comparison in found}


def test_every_figure_is_met_or_known_to_be_missed(comparisons: Mapping[str, Comparison]) -> None:
    missed = {key for key, comparison in comparisons.items() if not comparison.is_met}
    assert missed == {key for key, comparison in comparisons.items() if comparison.figure.miss}


def test_table_5_is_held_out_but_for_two_cells(comparisons: Mapping[str, Comparison]) -> None:
    rates = [
        comparison for key, comparison in comparisons.items() if key.startswith("R1") and key.endswith("rate")
    ]
    assert len(rates) == 6
    assert sum(comparison.figure.role is Role.FITTED for comparison in rates) == 2
    assert max(abs(comparison.error) for comparison in rates) < 0.10
    gains = [comparison for key, comparison in comparisons.items() if key.endswith(": gain")]
    assert len(gains) == 3
    assert max(abs(comparison.error) for comparison in gains) < 0.05


def test_published_rates_are_those_of_the_table(files: Mapping[str, MachineFile]) -> None:
    """Tokens/s of a step of all slots, with the table's factor."""
    prompt, _, batch, _, published, _ = TABLE_5[0]
    assert table_5_rate(files["sn40l"].machine, batch, prompt) / MULTI_TOKEN / batch == pytest.approx(
        published / 2.4 / 16, rel=0.01
    )


def test_machine_files_have_the_fitted_values(files: Mapping[str, MachineFile]) -> None:
    figures = published_figures()
    fitted = fit(figures, files)
    for parameter in parameters(figures, files):
        shipped = getattr(files[parameter.machine].machine, parameter.name)
        assert shipped == pytest.approx(getattr(fitted[parameter.machine], parameter.name), rel=0.01), (
            parameter.name
        )
        assert parameter.low < shipped < parameter.high


def test_a_parameter_has_one_figure_and_no_published_number_is_fitted(
    files: Mapping[str, MachineFile],
) -> None:
    fits = [figure.fits for figure in published_figures() if figure.fits]
    assert len(fits) == len(set(fits)) <= 12
    name, parameter = fits[0].split(".")
    assert files[name].quantities[parameter].source.startswith("fitted")


def test_a_figure_that_no_parameter_brings_out_is_an_error(files: Mapping[str, MachineFile]) -> None:
    impossible = next(figure for figure in decode_figures() if figure.fits)
    with pytest.raises(CalibrationError, match="stays"):
        fit((replace(impossible, low=1e7, high=1e7),), files)


def test_without_the_two_assumptions_table_5_is_missed(files: Mapping[str, MachineFile]) -> None:
    assert not expected_experts(files).worst.is_met
    assert all(
        ours == 2 * published for ours, published in batches_without_reserve(files["sn40l"].machine).values()
    )

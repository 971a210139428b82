"""Published figures beside ours, and the fit behind the machine files."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backends.sn40l.description.hardware import MachineFile, load_machine_file
from backends.sn40l.evidence.assumptions import batches_without_reserve, expected_experts
from backends.sn40l.evidence.calibration import CalibrationError, fit, parameters
from backends.sn40l.evidence.judgement import Evidence, Kind, judge
from backends.sn40l.evidence.measures import MULTI_TOKEN, TABLE_5, table_5_rate
from backends.sn40l.evidence.published import MACHINES, published_figures


@pytest.fixture(scope="module")
def files() -> dict[str, MachineFile]:
    return {name: load_machine_file(name) for name in MACHINES}


@pytest.fixture(scope="module")
def evidence(files: Mapping[str, MachineFile]) -> dict[str, Evidence]:
    """The figures without those of speculative decoding, which take longer."""
    figures = [figure for figure in published_figures() if " with " not in figure.key]
    judged = judge(figures, files, {name: file.machine for name, file in files.items()})
    return {one.figure.key: one for one in judged}


def test_predictions_are_few_and_their_misses_are_explained(evidence: Mapping[str, Evidence]) -> None:
    predictions = {key: one for key, one in evidence.items() if one.kind is Kind.PREDICTION}
    assert {key for key, one in predictions.items() if one.comparison.is_met} == {
        "R1 32k: gain",
        "R1 prefill: router",
        "looping, mean",
        "8B, 4 → 8 H100",
        "fused layer, of HBM peak",
    }
    failed = {key for key, one in predictions.items() if one.is_failed}
    assert failed == {key for key, one in evidence.items() if one.figure.miss}


def test_no_null_model_meets_a_prediction_and_some_parameter_decides_it(
    evidence: Mapping[str, Evidence],
) -> None:
    for key, one in evidence.items():
        if one.kind is Kind.PREDICTION and one.comparison.is_met:
            assert one.nulls, f"{key} is compared with nothing"
            assert not any(one.figure.is_met_by(value) for _, value in one.nulls), key
            assert one.low < one.comparison.ours < one.high


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("8B weights", Kind.ARITHMETIC),
        ("fusion at decode, least", Kind.ARITHMETIC),  # 1 to 13
        ("405B sequences on a DGX H100", Kind.ARITHMETIC),
        ("R1 64k full: rate", Kind.FITTED),  # a constant step meets it
        ("MiniMax TPOT at 10k", Kind.FITTED),  # a line through two fitted figures
        ("R1 prefill: ring", Kind.FITTED),  # zero meets it
        ("R1 prefill: projections", Kind.FITTED),  # a line through two fitted shares
        ("R1 64k full: batch", Kind.FITTED),  # the reserve was chosen with it in view
        ("8 → 16 sockets, best", Kind.FITTED),
        ("8B by vLLM on one H100, 10 requests", Kind.FITTED),  # weights at 0.8 of the bandwidth meet it
        ("8B by vLLM on one A100 80 GB, 10 requests", Kind.FITTED),
        ("8B by vLLM on one H100, 40 requests", Kind.FITTED),  # four times the rate of ten meets it
        ("8B by vLLM on one H100, 160 requests", Kind.FITTED),  # the line through 10 and 40
        ("8B by vLLM on one A100 80 GB, 320 requests", Kind.FITTED),
    ],
)
def test_what_could_not_fail_is_no_prediction(evidence: Mapping[str, Evidence], key: str, kind: Kind) -> None:
    assert evidence[key].kind is kind
    assert evidence[key].reason


def test_a_sweep_of_vllm_is_within_a_quarter_but_for_the_largest_batch(
    evidence: Mapping[str, Evidence],
) -> None:
    errors = {key: one.comparison.error for key, one in evidence.items() if "by vLLM" in key}
    assert len(errors) == 7
    beyond = {key for key, error in errors.items() if abs(error) > 0.25}
    assert beyond == {"8B by vLLM on one H100, 320 requests"}


def test_every_figure_is_sourced_and_computed_once() -> None:
    figures = published_figures()
    assert len({figure.key for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.low <= figure.high, figure.key
        assert len(figure.source) > 5, figure.key


def test_acceptance_is_fitted_with_few_drafts(files: Mapping[str, MachineFile]) -> None:
    machines = {name: file.machine for name, file in files.items()}
    figures = {figure.key: figure for figure in published_figures()}
    assert figures["70B with 8B, 5 drafts"].compute(machines) == pytest.approx(2.8)
    assert 1 < figures["70B with 8B, 9 drafts"].compute(machines) < 10


def test_published_rates_are_those_of_the_table(files: Mapping[str, MachineFile]) -> None:
    """Tokens/s of a step of all slots, with the table's factor."""
    cell, _ = TABLE_5[0]
    ours = table_5_rate(files["sn40l"].machine, cell.batch, cell.entries)
    assert ours / MULTI_TOKEN / cell.batch == pytest.approx(434 / 2.4 / 16, rel=0.01)


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
    impossible = next(figure for figure in published_figures() if figure.fits)
    with pytest.raises(CalibrationError, match="stays"):
        fit((replace(impossible, low=1e7, high=1e7),), files)


def test_without_the_two_assumptions_table_5_is_missed(files: Mapping[str, MachineFile]) -> None:
    assert not expected_experts(files).worst.is_met
    assert all(
        ours == 2 * published for ours, published in batches_without_reserve(files["sn40l"].machine).values()
    )

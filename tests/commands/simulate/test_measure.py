"""Measuring a machine: the fit meets its own steps, and the file that is written is a machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from backends.sn40l.description.hardware import load_machine, load_machine_file
from backends.sn40l.step.kernels import Kernel
from commands.simulate import measure
from tests.commands.simulate.test_command import json_of


def test_an_efficiency_is_fitted_to_a_time() -> None:
    machine = load_machine("cpu")
    slow = measure._fitted(machine, "stream_efficiency", 2.0, lambda one: 0.5 / one.stream_efficiency)
    assert slow.stream_efficiency == pytest.approx(0.25)
    assert replace(slow, stream_efficiency=machine.stream_efficiency) == machine


def test_a_cpu_computes_products_and_attention_one_after_the_other() -> None:
    """A chunk behind others takes the time of its products, and of its attention besides."""
    kernel = Kernel("layer", gemm_operations=1e9, attention_operations=1e9)
    cpu = load_machine("cpu")
    bound = kernel.bounds(cpu)
    assert kernel.seconds(cpu) == pytest.approx(bound["products"] + bound["attention"])
    at_once = replace(cpu, overlaps_stages=True)
    assert kernel.seconds(at_once) == pytest.approx(max(bound["products"], bound["attention"]))


@pytest.mark.long
def test_measured_constants_are_a_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """How close the steps come is not asserted: other processes disturb them here.

    But a prompt multiplies at about the rate of the product that is measured alone.
    """
    path = tmp_path / "here.toml"
    options = ("--no-compile", "--repeats", "1", "--context", "2048", "--output", str(path))
    values = json_of(capsys, "measure", *options)
    fitted = [step for step in values["steps"] if step["use"] != "held out"]
    assert len(fitted) == 6
    assert len(values["steps"]) == 11
    assert all(step["measured_seconds"] > 0 < step["simulated_seconds"] for step in values["steps"])
    assert 0.011 < values["constants"]["gemm_efficiency"] < 1.99, "the limits of the fit are 0.01 and 2"
    machine = load_machine(str(path))
    assert machine.hbm_bandwidth == values["constants"]["hbm_bandwidth"]
    assert load_machine_file(str(path)).quantities["launch"].source.startswith("measured")

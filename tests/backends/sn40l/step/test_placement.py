"""Placement keeps within every memory, and says by how much it cannot."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sn40l.description.hardware import load_machine
from backends.sn40l.step.decode import decode_placement, decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment
from backends.sn40l.step.placement import DoesNotFitError, fitting, max_batch, slot_bytes
from tests.backends.sn40l.strategies import deployments, model, shapes, sn40l


@settings(deadline=None)
@given(deployments(sn40l()), shapes, st.booleans(), st.booleans())
def test_no_tier_holds_more_than_it_can(
    deployment: Deployment, shape: DecodeShape, uses_ddr: bool, slots_in_ddr: bool
) -> None:
    try:
        placements = fitting(replace(deployment, uses_ddr=uses_ddr, slots_in_ddr=slots_in_ddr), shape)
    except DoesNotFitError:
        return
    for placement in placements:
        for tier in placement.tiers:
            assert 0 <= tier.used <= tier.capacity * (1 + 1e-9), tier
            assert all(size >= 0 for _, size in tier.parts)
        weights = sum(size for tier in placement.tiers for name, size in tier.parts if name == "weights")
        assert weights == pytest.approx(deployment.model.weight_bytes / deployment.num_sockets)
        slots = sum(size for tier in placement.tiers for name, size in tier.parts if name == "slots")
        split = placement.sockets_per_sequence
        assert slots == pytest.approx(slot_bytes(deployment.model, shape, deployment.num_sockets, split))


@settings(deadline=None)
@given(deployments(sn40l()), shapes)
def test_missing_bytes_are_reported(deployment: Deployment, shape: DecodeShape) -> None:
    try:
        fitting(deployment, shape)
    except DoesNotFitError as error:
        if error.tier == "HBM":  # SRAM is never short with these models and batches
            machine = deployment.machine
            enough = machine.hbm_capacity + error.missing * 1.000001 / (1 - machine.hbm_reserve)
            fitting(replace(deployment, machine=replace(machine, hbm_capacity=enough)), shape)


@pytest.mark.parametrize(
    ("capacity", "batch"), [(131072, 16), (65536, 32), (32768, 64), (16384, 128), (8192, 256)]
)
def test_largest_batches_of_deepseek_r1(capacity: int, batch: int) -> None:
    """As published (arXiv 2511.03092, table 5), from memory alone."""
    deployment = Deployment(model("deepseek-r1"), sn40l(), 16)
    assert max_batch(deployment, DecodeShape(1, capacity)) == batch
    with pytest.raises(DoesNotFitError, match="GB are missing"):
        fitting(deployment, DecodeShape(2 * batch, capacity))


def test_a_refusal_has_the_numbers() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        fitting(Deployment(model("llama-3.1-405b"), load_machine("dgx-h100"), 8), DecodeShape(1, 4096))
    assert caught.value.needed == pytest.approx(811.7e9 / 8, rel=0.01)
    assert caught.value.available == pytest.approx(72e9)
    assert "101.73 GB a socket, 72.00 GB are free, 29.73 GB are missing" in str(caught.value)


def test_overflowing_weights_stream_from_ddr_and_are_slow() -> None:
    deployment = Deployment(model("llama-3.1-70b"), sn40l(), 2, uses_ddr=True)
    shape = DecodeShape(1, 4096)
    placement = decode_placement(deployment, shape)
    ddr = next(tier for tier in placement.tiers if tier.name == "DDR")
    assert ddr.used > 10e9
    assert decode_step(deployment, shape).seconds > ddr.used / sn40l().ddr_bandwidth


def test_overflowing_slots_stream_from_ddr_and_are_slow() -> None:
    deployment = Deployment(model("llama-3.1-8b"), sn40l(), 16)
    more = replace(deployment, slots_in_ddr=True)
    most = max_batch(deployment, DecodeShape(1, 131072))
    assert max_batch(more, DecodeShape(1, 131072)) > 4 * most
    assert decode_step(more, DecodeShape(most, 131072)) == decode_step(deployment, DecodeShape(most, 131072))
    shape = DecodeShape(4 * most, 131072)
    ddr = next(tier for tier in decode_placement(more, shape).tiers if tier.name == "DDR")
    assert ddr.used > 10e9
    assert decode_step(more, shape).seconds > ddr.used / sn40l().ddr_bandwidth


def test_a_draft_beside_the_model_takes_memory() -> None:
    deployment = Deployment(model("llama-3.1-8b"), load_machine("h100"), 1)
    beside = replace(deployment, beside=(model("llama-3.2-1b"),))
    most = max_batch(deployment, DecodeShape(1, 8192))
    assert max_batch(beside, DecodeShape(1, 8192)) < most
    (placement,) = fitting(beside, DecodeShape(1, 8192))
    assert dict(placement.tiers[1].parts)["other models"] == model("llama-3.2-1b").weight_bytes


def test_a_gpu_holds_activations_in_its_memory() -> None:
    """95 sequences of an 8B have more activations than an H100's cache, and vLLM's default is 256."""
    deployment = Deployment(model("llama-3.1-8b"), load_machine("h100"), 1)
    (placement,) = fitting(deployment, DecodeShape(256, 1024))
    tiers = {tier.name: dict(tier.parts) for tier in placement.tiers}
    assert tiers["SRAM"]["activations"] == pytest.approx(50e6)
    assert tiers["HBM"]["activations"] == pytest.approx(4 * 256 * (4096 + 128256) - 50e6)
    with pytest.raises(DoesNotFitError, match="does not fit into SRAM: activations of 2000 sequences"):
        fitting(Deployment(model("llama-3.1-8b"), sn40l(), 1), DecodeShape(2000, 1))


def test_a_dynamic_machine_takes_any_number_of_slots() -> None:
    deployment = Deployment(model("llama-3.1-8b"), load_machine("dgx-h100"), 8)
    most = max_batch(deployment, DecodeShape(1, 32768))
    fitting(deployment, DecodeShape(most, 32768))
    with pytest.raises(DoesNotFitError):
        fitting(deployment, DecodeShape(most + 1, 32768))

"""Physics of a decode step, for any model, shape and number of sockets."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sn40l.description.hardware import load_machine
from backends.sn40l.step.decode import decode_placement, decode_seconds, decode_step
from backends.sn40l.step.deployment import DecodeShape, Deployment, DeploymentError, Execution
from backends.sn40l.step.kernels import Step, bottleneck
from backends.sn40l.step.placement import DoesNotFitError
from backends.sn40l.step.prefill import Chunk, prefill_step
from tests.backends.sn40l.strategies import deployments, executions, model, models, roomy, shapes, sockets

ROUNDING = 1 + 1e-9
MORE_IS_FASTER = (
    "hbm_bandwidth",
    "link_bandwidth",
    "sram_bandwidth",
    "compute_unit_rate",
    "stream_efficiency",
    "gemm_efficiency",
    "decode_attention_efficiency",
)
MORE_IS_SLOWER = ("launch", "drain", "collective_latency", "pipeline_fill")


@settings(deadline=None)
@given(deployments(roomy()), shapes, st.floats(1, 10), st.sampled_from(MORE_IS_FASTER))
def test_more_of_a_resource_is_never_slower(
    deployment: Deployment, shape: DecodeShape, factor: float, name: str
) -> None:
    more: dict[str, Any] = {name: getattr(deployment.machine, name) * factor}
    better = replace(deployment, machine=replace(deployment.machine, **more))
    assert decode_step(better, shape).seconds <= decode_step(deployment, shape).seconds * ROUNDING


@settings(deadline=None)
@given(deployments(roomy()), shapes, st.floats(1, 10), st.sampled_from(MORE_IS_SLOWER))
def test_more_overhead_is_never_faster(
    deployment: Deployment, shape: DecodeShape, factor: float, name: str
) -> None:
    more: dict[str, Any] = {name: getattr(deployment.machine, name) * factor}
    worse = replace(deployment, machine=replace(deployment.machine, **more))
    assert decode_step(worse, shape).seconds * ROUNDING >= decode_step(deployment, shape).seconds


def test_bandwidth_matters_where_it_binds() -> None:
    """The property above is not met by ignoring bandwidth."""
    deployment = Deployment(model("llama-3.1-70b"), roomy(), 16, Execution.LOOPED)
    doubled = replace(deployment, machine=replace(roomy(), hbm_bandwidth=2 * roomy().hbm_bandwidth))
    gain = (
        decode_step(deployment, DecodeShape(1, 4096)).seconds
        / decode_step(doubled, DecodeShape(1, 4096)).seconds
    )
    assert 1.5 < gain < 2


@settings(deadline=None)
@given(models, sockets, shapes)
def test_looping_is_never_slower_and_reads_the_same(which: Any, num_sockets: int, shape: DecodeShape) -> None:
    deployments = [
        Deployment(which, roomy(), num_sockets, execution)
        for execution in (Execution.FUSED, Execution.LOOPED)
    ]
    fused, looped = (decode_step(deployment, shape) for deployment in deployments)
    assert looped.seconds <= fused.seconds * ROUNDING
    assert looped.num_calls < fused.num_calls
    assert _weight_bytes(looped) == pytest.approx(_weight_bytes(fused))
    if len({decode_placement(deployment, shape).sockets_per_sequence for deployment in deployments}) == 1:
        assert looped.hbm_bytes == pytest.approx(fused.hbm_bytes)
        assert looped.operations == pytest.approx(fused.operations)


def test_looping_streams_while_it_computes() -> None:
    """If streaming and computing take equal time, a loop over layers is nearly twice as fast as calls."""
    machine = replace(roomy(), launch=0.0, drain=0.0, collective_latency=0.0)
    fused, looped = (
        decode_step(Deployment(model("qwen2.5-72b"), machine, 16, execution), DecodeShape(40, 1)).seconds
        for execution in (Execution.FUSED, Execution.LOOPED)
    )
    assert 1.8 < fused / looped <= 2


@settings(deadline=None)
@given(models, st.sampled_from((2, 4, 8, 16)), executions, st.integers(1, 100_000))
def test_a_second_sequence_at_most_doubles_a_step(
    which: Any, num_sockets: int, execution: Execution, capacity: int
) -> None:
    """On sockets that hold both it takes no longer than one after the other."""
    one, two = (
        decode_step(Deployment(which, roomy(), num_sockets, execution), DecodeShape(batch, capacity))
        for batch in (1, 2)
    )
    assert two.seconds <= 2 * one.seconds * ROUNDING


def test_sequences_that_do_not_fit_every_socket_are_shared_out_among_groups() -> None:
    """Two slots of 128k of DeepSeek-R1 do not fit one socket, and need not leave fourteen idle."""
    deployment = Deployment(model("deepseek-r1"), load_machine("sn40l"), 16)
    splits = [
        decode_placement(deployment, DecodeShape(batch, 131072)).sockets_per_sequence
        for batch in (1, 2, 4, 16)
    ]
    assert splits == [16, 8, 4, 1]
    rates = [
        batch / decode_step(deployment, DecodeShape(batch, 131072)).seconds for batch in (1, 2, 4, 8, 16)
    ]
    assert rates == sorted(rates)


@settings(deadline=None)
@given(models, sockets, shapes)
def test_fusion_is_never_slower(which: Any, num_sockets: int, shape: DecodeShape) -> None:
    plain = decode_step(Deployment(which, roomy(), num_sockets, Execution.OPERATORS), shape)
    fused = decode_step(Deployment(which, roomy(), num_sockets, Execution.FUSED), shape)
    assert fused.seconds <= plain.seconds * ROUNDING


@settings(deadline=None)
@given(models, st.sampled_from((1, 2, 4, 8)), executions, shapes)
def test_doubling_sockets_never_more_than_doubles(
    which: Any, num_sockets: int, execution: Execution, shape: DecodeShape
) -> None:
    one = decode_step(Deployment(which, roomy(), num_sockets, execution), shape)
    two = decode_step(Deployment(which, roomy(), 2 * num_sockets, execution), shape)
    assert 2 * two.seconds * ROUNDING >= one.seconds


@settings(deadline=None)
@given(deployments(roomy()), st.integers(1, 300), st.integers(1, 131072), st.integers(0, 131072))
def test_a_smaller_cache_is_never_slower(
    deployment: Deployment, batch: int, capacity: int, dropped: int
) -> None:
    full = decode_step(deployment, DecodeShape(batch, capacity + dropped))
    compressed = decode_step(deployment, DecodeShape(batch, capacity))
    assert compressed.seconds <= full.seconds * ROUNDING


@settings(deadline=None)
@given(deployments(roomy()), st.integers(1, 300), st.integers(1, 100_000))
def test_a_larger_batch_gives_no_faster_step(deployment: Deployment, batch: int, capacity: int) -> None:
    """Batches of whole rounds of sockets. One more sequence can share the fill of a pipeline for free."""
    num_sockets = deployment.num_sockets
    machine = replace(deployment.machine, pipeline_fill=0.0)
    plain = replace(deployment, machine=machine)
    smaller = decode_step(plain, DecodeShape(batch * num_sockets, capacity))
    larger = decode_step(plain, DecodeShape((batch + 1) * num_sockets, capacity))
    assert smaller.seconds <= larger.seconds * ROUNDING


@settings(deadline=None)
@given(st.sampled_from(("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b")), sockets, executions, shapes)
def test_every_weight_is_read_once(
    name: str, num_sockets: int, execution: Execution, shape: DecodeShape
) -> None:
    """All weights but the embedding table, of which a step reads its rows."""
    step = decode_step(Deployment(model(name), roomy(), num_sockets, execution), shape)
    described = model(name)
    table = 0 if described.is_tied else described.embedding_params * 2
    assert _weight_bytes(step) == pytest.approx(described.weight_bytes - table)


@settings(deadline=None)
@given(st.sampled_from(("mixtral-8x7b", "gpt-oss-120b", "deepseek-r1")), sockets, st.integers(1, 300))
def test_experts_are_read_as_the_batch_could_choose_them(name: str, num_sockets: int, batch: int) -> None:
    described = model(name)
    step = decode_step(Deployment(described, roomy(), num_sockets), DecodeShape(batch, 4096))
    experts = next(layer.experts for layer in described.layers if layer.experts)
    share = experts.most_touched(batch) / experts.num_experts
    dense = sum(described.dense_bytes(layer) for layer in described.layers) + described.embedding_params * 2
    routed = sum(described.expert_bytes(layer) for layer in described.layers)
    assert _weight_bytes(step) == pytest.approx(dense + share * routed)


@settings(deadline=None)
@given(st.sampled_from((1, 2, 4, 8)), st.integers(1, 64), st.integers(1, 100_000))
def test_cache_is_read_once_where_heads_divide(num_sockets: int, batch: int, capacity: int) -> None:
    described = model("llama-3.1-8b")
    step = decode_step(Deployment(described, roomy(), num_sockets), DecodeShape(batch, capacity))
    read = num_sockets * sum(event.kernel.cache_bytes for event in step.events if event.kernel)
    assert read == pytest.approx(batch * described.cache_bytes(capacity))


STORED_8B = 8 * 68  # bytes of a token's keys, or values, in a layer: 8 heads of 128 values in 4 bits


@settings(deadline=None)
@given(st.sampled_from((1, 2, 4, 8)), st.integers(1, 64), st.integers(1, 100_000), st.integers(1, 4096))
def test_of_a_store_keys_are_read_and_few_values(
    num_sockets: int, batch: int, num_stored: int, num_attended: int
) -> None:
    described, layers = model("llama-3.1-8b"), 32
    shape = DecodeShape(batch, 128 + num_stored, 128, num_attended)
    kernels = [
        event.kernel
        for event in decode_step(Deployment(described, roomy(), num_sockets), shape).events
        if event.kernel
    ]
    read = num_sockets * sum(kernel.cache_bytes for kernel in kernels)
    assert read == pytest.approx(batch * (described.cache_bytes(128) + layers * num_stored * STORED_8B))
    gathered = num_sockets * sum(kernel.gather_bytes for kernel in kernels)
    scores = 4 * 4 * 8 * num_stored
    chosen = min(num_attended, num_stored) * STORED_8B
    assert gathered == pytest.approx(batch * layers * (scores + chosen))


@settings(deadline=None)
@given(deployments(roomy()), st.integers(1, 64), st.integers(1, 8192), st.integers(0, 131072))
def test_a_store_without_tokens_costs_nothing(
    deployment: Deployment, batch: int, capacity: int, num_spare: int
) -> None:
    plain = decode_step(deployment, DecodeShape(batch, capacity))
    assert decode_step(deployment, DecodeShape(batch, capacity, capacity + num_spare, 128)) == plain


def test_layers_with_a_sliding_window_have_no_store() -> None:
    windowed = model("gpt-oss-120b")
    shape = DecodeShape(1, 8192, 128, 256)
    by_window = {
        layer.attention.window: shape.layer_bytes(windowed, layer.attention) for layer in windowed.layers
    }
    width = 2 * 8 * 64
    assert by_window == {128: 128 * width * 2, None: 128 * width * 2 + 8064 * 2 * 8 * 34}


def test_latents_are_stored_once() -> None:
    """512 numbers of a latent and 64 of its rotary key: 288 bytes of codes, and 9 steps."""
    latent = model("deepseek-r1")
    plain, stored = DecodeShape(1, 128), DecodeShape(1, 129, 128, 1)
    assert stored.sequence_bytes(latent) - plain.sequence_bytes(latent) == pytest.approx(61 * 306)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "deepseek-r1"])
def test_sparse_is_between_full_and_a_slot_of_what_it_attends_to(name: str) -> None:
    """At a long context. It reads all keys in 4 bits."""
    deployment = Deployment(model(name), roomy(), 16)
    shapes = DecodeShape(4, 131072), DecodeShape(4, 131072, 128, 4096), DecodeShape(4, 128 + 4096)
    full, sparse, small = (decode_step(deployment, shape).seconds for shape in shapes)
    assert small < sparse < full


def test_a_machine_that_runs_kernels_one_by_one_pays_for_each() -> None:
    step = decode_step(Deployment(model("llama-3.1-8b"), load_machine("dgx-h100"), 8), DecodeShape(1, 4096))
    assert step.num_calls == 10 * 32 + 3
    assert bottleneck(step, load_machine("dgx-h100")) == "gaps"


def test_a_gpu_reads_slots_only_when_its_products_are_done() -> None:
    """With 512 sequences, products wait for computing and attention for memory."""
    machine = replace(load_machine("h100"), hbm_capacity=1e12)
    step = decode_step(Deployment(model("llama-3.1-8b"), machine, 1), DecodeShape(512, 1024))
    parts = [event.kernel.bounds(machine) for event in step.events if event.kernel]
    apart = sum(one["products"] + one["cache"] for one in parts)
    assert sum(one["products"] for one in parts) > 1.2 * sum(one["weights"] for one in parts)
    assert step.seconds == pytest.approx(apart, rel=0.1)


def test_nodes_share_layers_and_hand_on_activations() -> None:
    """405 billion parameters in 16 bits need two nodes of eight H100."""
    one = Deployment(model("llama-3.1-405b"), load_machine("dgx-h100"), 8)
    with pytest.raises(DoesNotFitError):
        decode_step(one, DecodeShape(4, 8192))
    two = replace(one, num_nodes=2)
    step = decode_step(two, DecodeShape(4, 8192))
    roomy_machine = replace(one.machine, hbm_capacity=1e15)
    alone = decode_step(replace(one, machine=roomy_machine), DecodeShape(4, 8192)).seconds
    hop = 2 * 4 * 16384 / 8 / two.machine.node_bandwidth + two.machine.node_latency
    assert step.seconds == pytest.approx(alone + hop + two.call_seconds)
    assert decode_seconds(two, DecodeShape(4, 8192)) == pytest.approx(step.seconds)
    (prompt, whole) = (
        prefill_step(deployment, Chunk(4096)).seconds
        for deployment in (two, replace(one, machine=roomy_machine))
    )
    assert whole < prompt < 1.1 * whole
    with pytest.raises(DeploymentError, match="no node_bandwidth"):
        replace(one, machine=load_machine("sn40l"), num_nodes=2)
    with pytest.raises(DeploymentError, match="126 layers have 1 to as many nodes, got 127"):
        replace(one, num_nodes=127)


def test_an_unsupported_deployment_is_refused() -> None:
    with pytest.raises(DeploymentError, match="1 to 16 sockets, got 17"):
        Deployment(model("llama-3.1-8b"), roomy(), 17)
    with pytest.raises(DeploymentError, match="static graphs"):
        Deployment(model("llama-3.1-8b"), load_machine("dgx-h100"), 8, Execution.LOOPED)
    with pytest.raises(DeploymentError, match="not by the host"):
        Deployment(model("llama-3.1-8b"), roomy(), 8, Execution.LOOPED, host_launched=True)


def _weight_bytes(step: Step) -> float:
    return step.num_sockets * sum(event.kernel.weight_bytes for event in step.events if event.kernel)

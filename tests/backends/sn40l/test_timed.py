"""Any backend with another machine's time, and faults."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from backends.clock import PacedClock, VirtualClock
from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.interface import (
    BackendError,
    Batch,
    DecodeBatch,
    DecodeRow,
    Draw,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    PrefixSpec,
    SamplingParams,
    StoredBlock,
)
from backends.sn40l.backend import SimulationConfig, default_deployment
from backends.sn40l.step.cost_model import DeploymentCost, compression_of
from backends.sn40l.step.decode import decode_step
from backends.sn40l.step.deployment import DecodeShape
from backends.sn40l.step.placement import DoesNotFitError
from backends.sn40l.step.prefill import Chunk, Compression, prefill_step
from backends.timed import FailedStep, Fault, SlowSocket, StalledLink, TimedBackend, parse_fault
from cache.policy import PolicyName, full
from cache.policy_options import PolicyOptions

SHAPE = PrefillShape(1, 64)
DRAW = Draw(SamplingParams(temperature=0.0))


def prefill(num_tokens: int = 5) -> PrefillBatch:
    return PrefillBatch(
        (PrefillRow("a", tuple(range(num_tokens)), 0, num_tokens, (0,), draws=(DRAW,)),), SHAPE
    )


def decode(token_id: int, index: int, num_steps: int = 1) -> DecodeBatch:
    return DecodeBatch((DecodeRow("a", 0, token_id, index, 5, DRAW),), num_steps)


class Linear:
    """A second for each prompt token, ten for each decode step."""

    def seconds(self, batch: Batch) -> float:
        return (
            10.0 * batch.num_steps if isinstance(batch, DecodeBatch) else float(len(batch.rows[0].token_ids))
        )


def test_tokens_are_the_inner_backends_and_time_is_the_cost_models() -> None:
    clock = VirtualClock()
    timed, plain = TimedBackend(FakeBackend(), Linear(), clock), FakeBackend()
    for batch, end in ((prefill(), 5.0), (decode(7, 5, num_steps=3), 35.0)):
        result, expected = timed.submit(batch).result(), plain.submit(batch).result()
        assert result.tokens == expected.tokens
        assert (clock.now(), result.elapsed) == (end, end - (0 if end == 5.0 else 5))
    assert timed.spec.simulated
    assert not plain.spec.simulated


def test_a_step_waits_for_the_one_before_it() -> None:
    clock = VirtualClock()
    timed = TimedBackend(FakeBackend(), Linear(), clock)
    first, second = timed.submit(prefill()), timed.submit(decode(7, 5))
    assert first.result().elapsed == 5.0
    assert second.result().elapsed == 10.0
    assert clock.now() == 15.0


def test_the_inner_backends_own_time_is_part_of_the_step() -> None:
    clock = VirtualClock()
    inner = FakeBackend(clock=clock, step_time=lambda _: 2.0)
    timed = TimedBackend(inner, Linear(), clock)
    assert timed.submit(prefill()).result().elapsed == 5.0
    assert clock.now() == 5.0


def test_a_slow_socket_slows_every_step_and_a_stalled_link_some() -> None:
    clock = VirtualClock()
    timed = TimedBackend(FakeBackend(), Linear(), clock, [SlowSocket(2.0), StalledLink(every=2, stall=100.0)])
    assert timed.submit(prefill()).result().elapsed == 10.0
    assert timed.submit(decode(7, 5)).result().elapsed == 120.0
    assert timed.submit(decode(7, 6)).result().elapsed == 20.0


def test_a_failed_step_fails_and_the_next_one_does_not() -> None:
    timed = TimedBackend(FakeBackend(), Linear(), VirtualClock(), [FailedStep(every=2)])
    timed.submit(prefill()).result()
    with pytest.raises(BackendError, match="step 2 failed"):
        timed.submit(decode(7, 5)).result()
    timed.submit(prefill()).result()


def test_steps_fail_several_times_in_a_row() -> None:
    timed = TimedBackend(FakeBackend(), Linear(), VirtualClock(), [FailedStep(every=3, times=2)])
    for step in range(1, 12):
        with pytest.raises(BackendError) if step in (3, 4, 6, 7, 9, 10) else nullcontext():
            timed.submit(prefill()).result()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow-socket=1.5", SlowSocket(1.5)),
        ("stalled-link=100:0.5", StalledLink(100, 0.5)),
        ("failed-step=7", FailedStep(7)),
        ("failed-step=7:2", FailedStep(7, 2)),
    ],
)
def test_faults_are_parsed(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    ["", "slow-socket", "slow-socket=0.5", "failed-step=0", "failed-step=5:0", "stalled-link=5", "fire=1"],
)
def test_invalid_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of slow-socket=FACTOR"):
        parse_fault(text)


def test_a_paced_clock_runs_at_its_scale() -> None:
    clock = PacedClock(time_scale=1000)
    before = clock.now()
    clock.elapse(1.0)
    assert clock.now() - before >= 1.0
    with pytest.raises(ValueError, match="above 0"):
        PacedClock(0)


def test_a_deployment_times_batches_by_their_static_shapes() -> None:
    policy = PolicyOptions(slot_capacity=256, num_sink=4).resolve(4096)
    inner = FakeBackend(fake_spec(num_slots=8, policy=policy))
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    cost = DeploymentCost(deployment, inner.spec.pools[0])
    step = decode_step(deployment, DecodeShape(8, 256)).seconds
    assert cost.seconds(decode(7, 5, num_steps=3)) == pytest.approx(3 * step)
    assert (
        cost.seconds(prefill(3))
        == cost.seconds(prefill(60))
        == pytest.approx(prefill_step(deployment, Chunk(64)).seconds)
    )


def test_pools_are_timed_each_for_its_own_slots_and_must_fit_together() -> None:
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    narrow = slot_pool(8, PolicyOptions(slot_capacity=256, num_sink=4).resolve(4096), 4096)
    wide = slot_pool(2, full(4096), 4096)
    inner = FakeBackend(fake_spec(pools=(narrow, wide), max_model_len=4096))
    cost = DeploymentCost(deployment, *inner.spec.pools)
    for pool, shape in enumerate((DecodeShape(8, 256), DecodeShape(2, 4096))):
        step = decode_step(deployment, shape).seconds
        assert cost.seconds(replace(decode(7, 5), pool=pool)) == pytest.approx(step)
    with pytest.raises(DoesNotFitError):
        DeploymentCost(deployment, narrow, slot_pool(100_000, full(131072), 131072))


def test_the_last_chunk_of_a_long_prompt_is_followed_by_its_compression() -> None:
    policy = PolicyOptions(slot_capacity=256, num_sink=4).resolve(4096)
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    cost = DeploymentCost(deployment, fake_spec(policy=policy).pools[0])
    rows = [
        PrefillRow("a", (0,) * 64, start, 640, (0,), scratch=0, draws=(DRAW,) * (start == 576))
        for start in (512, 576)
    ]
    middle, last = (cost.seconds(PrefillBatch((row,), SHAPE)) for row in rows)
    assert compression_of(policy, 640) == Compression(126, 126, 256)
    assert last > middle
    assert compression_of(policy, 256) is None
    assert compression_of(full(4096), 5000) is None


def test_a_long_prompt_is_quantised_into_its_store() -> None:
    policy = PolicyOptions(PolicyName.SPARSE).resolve(4096)
    assert compression_of(policy, 128) is None
    assert compression_of(policy, 640) == Compression(124, 0, 0, num_stored=512)
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    kernels = prefill_step(deployment, Chunk(640, compression=compression_of(policy, 640))).events
    stored = [event.kernel for event in kernels if event.kernel and event.name == "store"]
    moved = 16 * sum(kernel.gather_bytes for kernel in stored)
    assert moved == pytest.approx(32 * 512 * (2 * 8 * 128 * 2 + 2 * 8 * 68))  # read in 16 bits, written in 4


@pytest.mark.parametrize("machine", ["sn40l", "dgx-h100"])
def test_a_store_is_timed_as_long_as_its_sequences(machine: str) -> None:
    """A static graph reads all of a store, a dynamic machine what is held."""
    deployment = default_deployment("llama-3.1-8b", machine, 8)
    sparse, whole = (
        DeploymentCost(deployment, slot_pool(4, PolicyOptions(name).resolve(131072), 131072))
        for name in (PolicyName.SPARSE, PolicyName.FULL)
    )
    short, long = (DecodeBatch((DecodeRow("a", 0, 7, size, size, DRAW),)) for size in (1000, 100_000))
    if deployment.machine.pads_decode:
        assert sparse.seconds(short) == sparse.seconds(long)
    else:
        assert sparse.seconds(short) < sparse.seconds(long)
    assert sparse.seconds(long) < whole.seconds(long)


def test_pools_with_and_without_a_store_fit_together() -> None:
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    pools = [
        slot_pool(8, PolicyOptions(name).resolve(4096), 4096) for name in (PolicyName.SPARSE, PolicyName.FULL)
    ]
    cost = DeploymentCost(deployment, *pools)
    shapes = DecodeShape(8, 4096, 128, 128), DecodeShape(8, 4096)
    for pool, shape in enumerate(shapes):
        step = decode_step(deployment, shape).seconds
        assert cost.seconds(replace(decode(7, 5), pool=pool)) == pytest.approx(step)
    DeploymentCost(deployment, *pools, slot_pool(0, full(4096), 4096))  # a pool without slots takes nothing


def test_a_prompt_that_its_slot_holds_is_not_compressed_behind_its_scratch() -> None:
    policy = PolicyOptions(slot_capacity=256, num_sink=4).resolve(4096)
    cost = DeploymentCost(default_deployment("llama-3.1-8b", "sn40l", 16), fake_spec(policy=policy).pools[0])
    (row,) = prefill(200).rows
    shape = PrefillShape(1, 256)
    in_scratch, direct = (
        cost.seconds(PrefillBatch((replace(row, scratch=scratch),), shape)) for scratch in (0, None)
    )
    assert in_scratch == direct


def test_tokens_that_only_vote_take_time() -> None:
    policy = PolicyOptions(slot_capacity=256).resolve(4096)
    deployment = default_deployment("llama-3.1-8b", "sn40l", 16)
    cost = DeploymentCost(deployment, fake_spec(policy=policy).pools[0])
    last = PrefillRow("a", (0,) * 64, 576, 640, (0,), scratch=0, draws=(DRAW,))
    echoing = replace(last, echo=(0,) * 64)
    alone, with_echo = (cost.seconds(PrefillBatch((row,), SHAPE)) for row in (last, echoing))
    assert alone < with_echo < 3 * alone


def test_a_dynamic_machine_is_timed_for_its_live_rows() -> None:
    spec = fake_spec(num_slots=64)
    cost = DeploymentCost(default_deployment("llama-3.1-8b", "dgx-h100", 8), spec.pools[0])
    rows = tuple(DecodeRow(str(slot), slot, 1, 5, 5, DRAW) for slot in range(64))
    assert cost.seconds(DecodeBatch(rows[:1])) < cost.seconds(DecodeBatch(rows))


def test_a_dynamic_machine_is_timed_for_the_entries_that_are_held() -> None:
    """The capacity of the slots does not matter, what they hold does."""
    deployment = default_deployment("llama-3.1-8b", "dgx-h100", 8)
    row = DecodeRow("a", 0, 7, 1000, 1000, DRAW)
    short, long, padded = (
        DeploymentCost(default_deployment("llama-3.1-8b", machine, 8), slot_pool(16, full(size), size))
        for machine, size in (("dgx-h100", 2048), ("dgx-h100", 131072), ("sn40l", 131072))
    )
    expected = decode_step(deployment, DecodeShape(1, 1001)).seconds
    assert short.seconds(DecodeBatch((row,))) == pytest.approx(expected, rel=0.01)
    assert long.seconds(DecodeBatch((row,))) == pytest.approx(expected, rel=0.03)
    more = replace(row, index=100_000)
    assert long.seconds(DecodeBatch((more,))) > 1.2 * expected
    assert padded.seconds(DecodeBatch((row,))) == padded.seconds(DecodeBatch((more,)))


def test_only_static_graphs_pad_a_chunk_to_its_shape() -> None:
    for machine, pads in (("sn40l", True), ("h100", False)):
        deployment = default_deployment("llama-3.1-8b", machine, 1)
        cost = DeploymentCost(deployment, slot_pool(1, full(4096), 4096))
        short, whole = (
            cost.seconds(PrefillBatch(prefill(num_tokens).rows, PrefillShape(1, 1024)))
            for num_tokens in (300, 1024)
        )
        assert (short == whole) is pads
        # 300 tokens fill 19 tiles of 16.
        expected = prefill_step(deployment, Chunk(1024 if pads else 304)).seconds
        assert short == pytest.approx(expected)


def test_slots_that_do_not_fit_the_simulated_machine_are_refused() -> None:
    inner = FakeBackend(fake_spec(num_slots=64, max_model_len=131072))
    with pytest.raises(DoesNotFitError, match="64 slots of 131072 entries"):
        SimulationConfig(model="deepseek-r1").backend(inner, VirtualClock())


def test_a_configuration_makes_its_clock_and_backend() -> None:
    config = SimulationConfig(time_scale=None, faults=(SlowSocket(2.0),))
    clock = config.clock()
    slow = config.backend(FakeBackend(), clock)
    plain = SimulationConfig().backend(FakeBackend(), VirtualClock())
    assert isinstance(clock, VirtualClock)
    assert isinstance(SimulationConfig(time_scale=2.0).clock(), PacedClock)
    assert slow.submit(prefill()).result().elapsed == pytest.approx(
        2 * plain.submit(prefill()).result().elapsed
    )


def test_stored_blocks_are_copied_in_the_simulated_models_bytes() -> None:
    """A block of 128 tokens of Llama 3.1 8B has 16.8 MB, and 16 sockets copy 1.6 TB/s."""
    inner = FakeBackend(fake_spec(prefixes=PrefixSpec(1 << 20, 128, 1024)))
    backend = SimulationConfig(time_scale=None).backend(inner, VirtualClock())
    store = backend.spec.prefixes
    assert store is not None
    assert store == PrefixSpec((1 << 30) // store.block_bytes, 128, 128 * 32 * 8 * 128 * 2 * 2)
    block = StoredBlock(0, 0)
    tokens = tuple(range(256))
    begin = tokens[:128]
    first = PrefillRow("a", begin, 0, 256, (0,), stored_blocks=(block,))
    hit = PrefillRow(
        "b",
        tokens[128:],
        128,
        256,
        (1,),
        draws=(DRAW,),
        restored_blocks=(0,),
        restored_token_ids=begin,
    )
    shape = PrefillShape(1, 256)
    copy = store.block_bytes / 1.6e12
    stored = backend.submit(PrefillBatch((first,), shape)).result()
    plain = backend.submit(PrefillBatch((replace(first, stored_blocks=()),), shape)).result()
    assert stored.elapsed - plain.elapsed == pytest.approx(copy)
    restored = backend.submit(PrefillBatch((hit,), shape)).result()
    assert restored.restore_time == pytest.approx(copy)
    assert restored.elapsed > restored.restore_time

"""The engine's thread behind its client: tickets, streams, ends of every kind, health."""

import asyncio
import random
import threading
from contextlib import aclosing

import pytest

from backends.clock import VirtualClock, WallClock
from backends.fake import FakeBackend, fake_spec
from backends.fake_model import expected_tokens
from backends.interface import Backend, BackendError, BackendUnusableError, Batch
from scheduler.admission import admit
from scheduler.config import SchedulerConfig
from scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.messages import Add, AdmittedAdd, EngineOutput, FinishReason
from server.engine.async_engine import AsyncEngine
from server.engine.client import HealthStatus, QueueFullError, UnavailableError
from tests.server.engines import GREEDY, Gate, Observations, add_of, generate, is_at_rest, running


async def outputs_of(engine: AsyncEngine, add: Add) -> list[EngineOutput]:
    return [output async for output in generate(engine, add)]


def tokens_of(outputs: list[EngineOutput], choice: int = 0) -> list[int]:
    return [token.token_id for output in outputs if output.choice == choice for token in output.tokens]


def reasons_of(outputs: list[EngineOutput]) -> list[FinishReason]:
    return [output.final.reason for output in outputs if output.final is not None]


async def test_a_stream_begins_with_acceptance_and_ends_with_one_final_output() -> None:
    seen = Observations()
    async with running(seen) as engine:
        add = add_of(max_tokens=6)
        outputs = await outputs_of(engine, add)
    assert (outputs[0].tokens, outputs[0].final) == ((), None)
    assert tokens_of(outputs) == expected_tokens(add.prompt_token_ids, GREEDY, 6, vocab_size=512)
    assert [output.final is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].tokens == ()
    assert (seen.num_generated, seen.prompts) == (6, [add])
    assert seen.gaps[0] is None
    assert all(gap is not None and gap >= 0 for gap in seen.gaps[1:])


async def test_served_tokens_are_counted_once_somebody_takes_them() -> None:
    async with running(Observations()) as engine:
        assert engine.take_served() == {}
        add = add_of(max_tokens=6)
        await outputs_of(engine, add)
        expected = INPUT_WEIGHT * len(add.prompt_token_ids) + OUTPUT_WEIGHT * 6
        assert engine.take_served() == {add.tenant: expected}
        assert engine.take_served() == {}
        engine.charge_elsewhere({add.tenant: 100})
        await outputs_of(engine, add_of(max_tokens=2))


async def test_every_choice_has_its_own_end() -> None:
    seen = Observations()
    async with running(seen) as engine:
        outputs = await outputs_of(engine, add_of(num_choices=11))  # more than there are slots
    assert sorted(output.choice for output in outputs if output.final is not None) == list(range(11))
    assert len(seen.prompts) == 1
    assert seen.num_generated == 88


async def test_tickets_are_taken_once_and_released_once() -> None:
    seen = Observations()
    async with running(seen, max_num_waiting=2) as engine:  # with 8 slots
        first, second = engine.reserve(7), engine.reserve(3)
        with pytest.raises(QueueFullError) as full:
            engine.reserve(1)
        assert (full.value.num_held, full.value.limit, seen.num_refused) == (10, 10, 1)
        first.release()
        first.release()
        with engine.reserve(7), pytest.raises(QueueFullError):
            engine.reserve(1)
        second.release()
        with engine.reserve(10):
            pass


async def test_a_tenant_has_its_share_of_the_tickets() -> None:
    config = SchedulerConfig(max_num_waiting=8, max_num_waiting_per_tenant=2)
    async with running(Observations(), spec=fake_spec(num_slots=4), config=config) as engine:
        with engine.reserve(6, "heavy") as ticket:
            with pytest.raises(QueueFullError) as full:
                engine.reserve(1, "heavy")
            assert (full.value.num_held, full.value.limit) == (6, 6)
            with engine.reserve(6, "light"), pytest.raises(QueueFullError):
                engine.reserve(1, "third")
            ticket.release()
            with engine.reserve(6, "heavy"):
                pass


async def test_the_scheduler_never_refuses_an_admitted_request() -> None:
    """Requests are added and abandoned at random. Those with a ticket are accepted after any abort."""
    seen, rng = Observations(), random.Random(5)

    async def client(engine: AsyncEngine) -> None:
        for _ in range(12):
            try:
                ticket = engine.reserve(1)
            except QueueFullError:
                await asyncio.sleep(0)
                continue
            with ticket:
                async with aclosing(generate(engine, add_of(max_tokens=6))) as outputs:
                    async for output in outputs:
                        if output.final is None and rng.random() < 0.2:
                            break

    async with running(seen, spec=fake_spec(num_slots=2), max_num_waiting=3) as engine:
        await asyncio.gather(*(client(engine) for _ in range(12)))
        await seen.wait_until(is_at_rest)
        with engine.reserve(5):
            pass
    reasons = {final.reason for final in seen.finals.values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT}


async def test_closing_a_stream_aborts_the_request() -> None:
    seen, gate = Observations(), Gate(is_open=False)
    async with running(seen, gate=gate) as engine:
        add = add_of(max_tokens=1000)
        outputs = generate(engine, add)
        gate.let(1)
        await anext(outputs)
        await outputs.aclose()
        gate.let(1)  # for the step that began before the abort came, if one did
        await seen.wait_until(is_at_rest)
    assert seen.finals[add.request_id, 0].reason is FinishReason.ABORT


async def test_cancelling_a_stream_reader_aborts_the_request() -> None:
    seen, gate = Observations(), Gate(is_open=False)
    async with running(seen, gate=gate) as engine:
        add = add_of(max_tokens=1000, num_choices=2)
        task = asyncio.create_task(outputs_of(engine, add))
        await gate.wait_for_step()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.let(1)
        await seen.wait_until(lambda seen: len(seen.finals) == 2)
    assert {final.reason for final in seen.finals.values()} == {FinishReason.ABORT}


async def test_abort_ends_a_stream_that_is_listened_to() -> None:
    seen = Observations()
    async with running(seen) as engine:
        add, outputs = add_of(max_tokens=4000), []
        async for output in generate(engine, add):
            engine.abort(add.request_id)
            outputs.append(output)
    assert reasons_of(outputs) == [FinishReason.ABORT]


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("max_tokens", [3, 5, 7, 100])
async def test_finish_cuts_the_answer_at_its_stop_string(max_decode_steps: int, max_tokens: int) -> None:
    """Also where the answer's last token came with the engine's final output, which says `length`."""
    seen = Observations()
    outputs: list[EngineOutput] = []
    has_ended = asyncio.Event()
    async with running(seen, max_decode_steps=max_decode_steps) as engine:
        add = add_of(max_tokens=max_tokens)

        def receive(output: EngineOutput) -> None:
            num_before = len(tokens_of(outputs))
            if num_before < 3 <= num_before + len(output.tokens):
                engine.finish(add.request_id, 0, 3)
            outputs.append(output)
            if output.final is not None:
                has_ended.set()

        engine.submit(admit(add, engine.spec), receive)
        await has_ended.wait()
    final = outputs[-1].final
    assert final is not None
    assert (final.reason, final.num_output_tokens) == (FinishReason.STOP, 3)
    assert seen.finals[add.request_id, 0] == final
    assert seen.num_generated == 3
    assert len(tokens_of(outputs)) <= 3 + final.num_discarded_tokens


async def test_loading_is_reported_and_requests_are_refused() -> None:
    seen, may_load = Observations(), threading.Event()

    def load() -> Backend:
        assert may_load.wait(timeout=30)
        return FakeBackend(fake_spec())

    engine = AsyncEngine(load, SchedulerConfig(), seen, WallClock(), stall_limit=10.0)
    engine.start()
    assert engine.health().status is HealthStatus.LOADING
    with pytest.raises(UnavailableError):
        engine.reserve(1)
    with pytest.raises(UnavailableError):
        assert engine.spec
    may_load.set()
    assert (await engine.wait_loaded()).is_ready
    assert engine.spec.pools[0].num_slots == 8
    await engine.close()


async def test_a_failure_to_load_is_reported() -> None:
    def load() -> Backend:
        raise OSError("no such model")

    engine = AsyncEngine(load, SchedulerConfig(), Observations(), WallClock(), stall_limit=10.0)
    engine.start()
    health = await engine.wait_loaded()
    assert (health.status, health.is_alive) == (HealthStatus.DEAD, False)
    assert "no such model" in health.detail
    with pytest.raises(UnavailableError, match="no such model"):
        engine.reserve(1)
    outputs: list[EngineOutput] = []
    engine.submit(AdmittedAdd(add_of()), outputs.append)
    assert reasons_of(outputs) == [FinishReason.ERROR]
    await engine.close()


async def test_a_failed_step_ends_only_its_requests() -> None:
    seen = Observations()
    async with running(seen, faults=dict.fromkeys((2, 3), BackendError("lost"))) as engine:
        assert reasons_of(await outputs_of(engine, add_of())) == [FinishReason.ERROR]
        assert reasons_of(await outputs_of(engine, add_of())) == [FinishReason.LENGTH]
        assert engine.health().is_ready


async def test_a_dead_engine_ends_every_stream_with_an_error() -> None:
    seen = Observations()
    async with running(seen, faults={3: BackendUnusableError("the device is gone")}) as engine:
        streams = await asyncio.gather(
            *(outputs_of(engine, add_of(max_tokens=50, num_choices=2)) for _ in range(8))
        )
        assert [reasons_of(outputs) for outputs in streams] == [[FinishReason.ERROR] * 2] * 8
        assert engine.health().status is HealthStatus.DEAD
        with pytest.raises(UnavailableError):
            engine.reserve(1)
        outputs: list[EngineOutput] = []
    engine.submit(AdmittedAdd(add_of()), outputs.append)
    assert reasons_of(outputs) == [FinishReason.ERROR]
    assert len(seen.finals) == 17


async def test_an_unexpected_exception_ends_every_stream() -> None:
    class BrokenGate(Gate):
        def step(self, _: Batch) -> float:
            raise ZeroDivisionError("a fault of ours")

    async with running(Observations(), gate=BrokenGate()) as engine:
        assert reasons_of(await outputs_of(engine, add_of())) == [FinishReason.ERROR]
        assert engine.health().status is HealthStatus.DEAD


async def test_a_stall_is_seen_and_passes() -> None:
    clock, gate = VirtualClock(), Gate(is_open=False)
    async with running(Observations(), gate=gate, clock=clock) as engine:
        clock.elapse(100)
        assert engine.health().is_ready  # idle is not stalled
        task = asyncio.create_task(outputs_of(engine, add_of(max_tokens=2)))
        await gate.wait_for_step()
        clock.elapse(9)
        assert engine.health().is_ready
        clock.elapse(2)
        health = engine.health()
        assert (health.status, health.is_alive) == (HealthStatus.STALLED, False)
        assert "11 s" in health.detail
        gate.open()
        assert reasons_of(await task) == [FinishReason.LENGTH]
        assert engine.health().is_ready


async def test_draining_lets_running_requests_finish() -> None:
    gate = Gate(is_open=False)
    async with running(Observations(), gate=gate) as engine:
        ticket = engine.reserve(1)
        task = asyncio.create_task(outputs_of(engine, add_of()))
        await gate.wait_for_step()
        draining = asyncio.create_task(engine.drain(limit=30))
        await asyncio.sleep(0)
        assert engine.health().status is HealthStatus.DRAINING
        with pytest.raises(UnavailableError):
            engine.reserve(1)
        gate.open()
        assert reasons_of(await task) == [FinishReason.LENGTH]
        assert not draining.done()
        ticket.release()
        await draining


async def test_draining_aborts_at_its_limit() -> None:
    gate = Gate(is_open=False)
    async with running(Observations(), gate=gate) as engine:
        with engine.reserve(1):
            task = asyncio.create_task(outputs_of(engine, add_of(max_tokens=1000)))
            await gate.wait_for_step()
            await engine.drain(limit=0)
            gate.let(1)
            assert reasons_of(await task) == [FinishReason.ABORT]


async def test_closing_ends_what_is_open() -> None:
    gate = Gate(is_open=False)
    async with running(Observations(), gate=gate) as engine:
        task = asyncio.create_task(outputs_of(engine, add_of(max_tokens=1000)))
        await gate.wait_for_step()
        gate.let(1)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        assert reasons_of(await task) == [FinishReason.ABORT]
        outputs: list[EngineOutput] = []
    engine.submit(AdmittedAdd(add_of()), outputs.append)
    assert reasons_of(outputs) == [FinishReason.ERROR]

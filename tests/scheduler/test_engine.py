"""The engine's loop in a thread: every sequence ends once, with any failure."""

from dataclasses import replace
from threading import Event, Thread

import pytest

from backends.fake import Done, FakeBackend, fake_spec, slot_pool
from backends.interface import (
    BackendError,
    BackendUnusableError,
    Batch,
    BatchResult,
    DecodeBatch,
    Pending,
    PrefillShape,
    PrefixSpec,
    SamplingParams,
    SequencesLostError,
)
from cache.policy import full
from scheduler.config import SchedulerConfig
from scheduler.messages import EngineOutput, Finish, FinishReason, Shutdown
from scheduler.stats import StepKind, StepRecord
from tests.scheduler.drive import Drive, answer, request


class Running:
    """An engine's thread, and what it delivered."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.outputs: list[EngineOutput] = []
        self.records: list[StepRecord] = []
        self.has_died = Event()
        self.thread = Thread(target=drive.core.run, args=(self.deliver,))

    def deliver(self, outputs: list[EngineOutput], record: StepRecord) -> None:
        self.outputs += outputs
        self.records.append(record)
        if self.drive.core.error is not None:
            self.has_died.set()

    def reasons(self) -> dict[tuple[str, int], FinishReason]:
        finals = [
            (output.request_id, output.choice, output.final.reason)
            for output in self.outputs
            if output.final is not None
        ]
        assert len(finals) == len({final[:2] for final in finals})
        return {(request_id, choice): reason for request_id, choice, reason in finals}


def run_to_the_end(drive: Drive) -> Running:
    """Start the engine on what is in its inbox, `Shutdown` among it, and wait until it returns."""
    running = Running(drive)
    running.thread.start()
    running.thread.join(timeout=60)
    assert not running.thread.is_alive()
    return running


def test_tokens_do_not_depend_on_the_batch() -> None:
    drive = Drive(fake_spec(num_slots=3))
    sampled = SamplingParams(temperature=0.8, seed=3, top_p=0.9)
    adds = [
        request(f"r{i}", 3 + 40 * i, max_tokens=9 + i, num_choices=1 + i % 5, sampling=sampled)
        for i in range(8)
    ]
    drive.run(*adds)
    for add in adds:
        for choice in range(add.num_choices):
            assert drive.tokens(add.request_id, choice) == answer(add, drive.spec, choice)
            assert drive.final(add.request_id, choice).reason is FinishReason.LENGTH


def test_a_stop_inside_a_launch_discards_the_rest() -> None:
    drive = Drive(config=SchedulerConfig(max_decode_steps=4))
    free = request("a", max_tokens=10)
    tokens = answer(free, drive.spec)
    add = request("a", max_tokens=10, stop_token_ids=frozenset({tokens[2]}))
    drive.run(add)
    final = drive.final("a")
    assert drive.tokens("a") == tokens[:2]
    assert (final.reason, final.stop_token_id, final.num_output_tokens, final.num_discarded_tokens) == (
        FinishReason.STOP,
        tokens[2],
        3,
        2,
    )


def test_shutdown_ends_open_and_later_requests() -> None:
    drive = Drive(fake_spec(num_slots=1))
    drive.send(request("running", num_choices=2), request("waiting"), Shutdown(), request("late"))
    running = run_to_the_end(drive)
    assert running.reasons() == dict.fromkeys(
        [("running", 0), ("running", 1), ("waiting", 0), ("late", 0)], FinishReason.ABORT
    )
    assert running.records[-1].stats.num_running == 0
    assert not drive.scheduler.has_work


def test_requests_added_during_shutdown_are_answered() -> None:
    drive = Drive()
    running = Running(drive)

    def deliver(outputs: list[EngineOutput], record: StepRecord) -> None:
        running.deliver(outputs, record)
        if ("open", 0) in running.reasons() and not any(
            output.request_id == "late" for output in running.outputs
        ):
            drive.send(request("late", num_choices=2))

    drive.send(request("open"), Shutdown())
    drive.core.run(deliver)
    assert running.reasons() == dict.fromkeys([("open", 0), ("late", 0), ("late", 1)], FinishReason.ABORT)


def test_an_idle_engine_shuts_down() -> None:
    drive = Drive()
    drive.send(Shutdown())
    assert run_to_the_end(drive).outputs == []


@pytest.mark.parametrize("step", range(8))
def test_a_failed_step_is_tried_again_and_costs_nothing(step: int) -> None:
    """Prompts of several chunks and rows, restored blocks, several choices, packed prompts, decode."""
    prefixes = PrefixSpec(8, block_tokens=16, block_bytes=64)
    spec = fake_spec(
        num_slots=4, prefixes=prefixes, prefill_shapes=(PrefillShape(1, 32), PrefillShape(4, 32))
    )
    drive = Drive(spec, faults={step: BackendError("a bit flipped")})
    adds = [
        request("a", 80, 9, num_prompt_logprobs=2),
        request("b", 12, 6, num_choices=3, sampling=SamplingParams(temperature=0.9, seed=3)),
        request("c", 40, 5, tenant="t"),
    ]
    drive.run(*adds)
    drive.run(again := request("a again", 80, 4, prompt_token_ids=adds[0].prompt_token_ids))
    for add in (*adds, again):
        for choice in range(add.num_choices):
            assert drive.tokens(add.request_id, choice) == answer(add, drive.spec, choice)
            assert drive.final(add.request_id, choice).reason is FinishReason.LENGTH
    scores = [token for output in drive.outputs["a", 0] for token in output.prompt_logprobs]
    assert [token.token_id for token in scores] == list(adds[0].prompt_token_ids[1:])
    assert drive.num_failed == 1


class PoisonedBackend(FakeBackend):
    """Fails each batch of more than one row, or each that has a row of the request "bad"."""

    is_only_bad = True

    def submit(self, batch: Batch) -> Done:
        is_bad = any(row.request_id == "bad" for row in batch.rows)
        if is_bad if self.is_only_bad else len(batch.rows) > 1:
            return Done(BackendError("poisoned"))
        return super().submit(batch)


def test_the_row_at_fault_fails_alone() -> None:
    backend = PoisonedBackend(fake_spec(num_slots=4, prefill_shapes=(PrefillShape(4, 64),)))
    drive = Drive(backend=backend)
    adds = [request(name, max_tokens=6) for name in ("a", "bad", "b")]
    drive.run(*adds)
    assert (drive.final("bad").reason, drive.final("bad").message) == (FinishReason.ERROR, "poisoned")
    for add in (adds[0], adds[2]):
        assert drive.tokens(add.request_id) == answer(add, drive.spec)


def test_what_fails_in_company_is_served_row_by_row() -> None:
    backend = PoisonedBackend(fake_spec(num_slots=3, prefill_shapes=(PrefillShape(4, 64),)))
    backend.is_only_bad = False
    drive = Drive(backend=backend)
    adds = [request(name, 100, max_tokens=6) for name in "abc"]
    drive.run(*adds)
    for add in adds:
        assert drive.tokens(add.request_id) == answer(add, drive.spec)


class InterruptedBackend(FakeBackend):
    """Returns only the first steps of a launch, as one does whose later step failed."""

    def submit(self, batch: Batch) -> Done:
        if isinstance(batch, DecodeBatch) and batch.num_steps > 1:
            batch = replace(batch, num_steps=batch.num_steps - 1)
        return super().submit(batch)


def test_a_launch_may_end_early() -> None:
    drive = Drive(backend=InterruptedBackend(fake_spec()))
    adds = [request(name, max_tokens=11) for name in "ab"]
    drive.run(*adds)
    for add in adds:
        assert drive.tokens(add.request_id) == answer(add, drive.spec)
    assert sum(batch.num_tokens for batch in drive.batches if batch.kind is StepKind.DECODE) == 20


def test_lost_sequences_are_not_tried_again() -> None:
    drive = Drive(faults={1: SequencesLostError("the slots are lost")})
    drive.run(request("a"))
    assert drive.final("a").message == "the slots are lost"
    assert drive.num_failed == 1


def test_a_step_that_fails_twice_costs_only_its_batch() -> None:
    drive = Drive(fake_spec(num_slots=1), faults=dict.fromkeys((1, 2), BackendError("a bit flipped")))
    adds = [request(name, max_tokens=4) for name in "ab"]
    drive.run(*adds)
    assert (drive.final("a").reason, drive.final("a").message) == (FinishReason.ERROR, "a bit flipped")
    assert drive.final("b").reason is FinishReason.LENGTH
    assert drive.tokens("b") == answer(adds[1], drive.spec)


def test_a_dead_engine_ends_all_requests_and_refuses_later_ones() -> None:
    drive = Drive(fake_spec(num_slots=1), faults={2: BackendUnusableError("the device is gone")})
    drive.send(request("a", num_choices=2), request("b"))
    running = Running(drive)
    running.thread.start()
    assert running.has_died.wait(timeout=60)
    drive.send(request("c"), Finish("a", 0, 1), Shutdown())
    running.thread.join(timeout=60)
    assert running.reasons() == dict.fromkeys([("a", 0), ("a", 1), ("b", 0), ("c", 0)], FinishReason.ERROR)
    assert isinstance(drive.core.error, BackendUnusableError)
    messages = {output.final.message for output in running.outputs if output.final is not None}
    assert messages == {"the engine died: the device is gone"}


class ForgetfulBackend(FakeBackend):
    """Leaves the last row out of its results."""

    def submit(self, batch: Batch) -> Done:
        result = super().submit(batch).result()
        return Done(BatchResult(result.tokens[:-1], result.elapsed))


def test_an_internal_fault_kills_the_engine() -> None:
    """Half of a step's outputs were gathered when the fault came: none of them is lost, none is doubled."""
    drive = Drive(backend=ForgetfulBackend(fake_spec(prefill_shapes=(PrefillShape(4, 64),))))
    drive.send(request("a", max_tokens=1), request("b", max_tokens=1))
    running = Running(drive)
    running.thread.start()
    drive.send(Shutdown())
    running.thread.join(timeout=60)
    assert running.reasons() == {
        ("a", 0): FinishReason.LENGTH,
        ("b", 0): FinishReason.ERROR,
    }
    assert isinstance(drive.core.error, IndexError)


def test_records_count_every_token() -> None:
    drive = Drive(fake_spec(num_slots=2))
    adds = [request(f"r{i}", 100 + i, max_tokens=7) for i in range(5)]
    drive.run(*adds)
    prefills = [batch for batch in drive.batches if batch.kind is StepKind.PREFILL]
    decodes = [batch for batch in drive.batches if batch.kind is StepKind.DECODE]
    assert sum(batch.num_tokens for batch in prefills) == sum(len(add.prompt_token_ids) for add in adds)
    assert (
        sum(batch.num_tokens for batch in decodes) == 5 * 6
    )  # the first token of each comes from its prefill


def test_deadlines_are_looked_at_in_every_turn() -> None:
    drive = Drive(fake_spec(num_slots=1), step_time=lambda _batch: 1.0)
    drive.run(
        request("running", max_tokens=50, timeout=3.0),
        request("waiting", queue_timeout=2.0),
        request("waiting too"),
    )
    reasons = {name: drive.final(name).reason for name in ("running", "waiting", "waiting too")}
    assert reasons == {
        "running": FinishReason.TIMEOUT,
        "waiting": FinishReason.QUEUE_TIMEOUT,
        "waiting too": FinishReason.LENGTH,
    }
    assert (drive.final("running").timing.finished, drive.final("waiting").timing.finished) == (3.0, 2.0)


@pytest.mark.parametrize("num_messages", [0, 1])
def test_the_heartbeat_distinguishes_idle_from_busy(num_messages: int) -> None:
    def step_time(_batch: Batch) -> float:
        assert not drive.core.is_idle
        return 1.0

    drive = Drive(step_time=step_time)
    assert drive.core.is_idle
    drive.run(*(request(f"r{i}") for i in range(num_messages)))
    assert drive.core.last_step_time == drive.clock.now() == 2.0 * num_messages  # one prefill, one launch


def test_forced_tokens_use_long_launches_even_if_others_wait() -> None:
    """No slot can come free in them.

    The first of 21 tokens is yielded by prefill's draw, the answer comes one by one.
    """
    drive = Drive(fake_spec(num_slots=1, max_decode_steps=5))
    drive.run(request("a", 30, 3, num_prefill_tokens=9), request("b", 10, 1))
    assert [batch.num_steps for batch in drive.batches if batch.kind is StepKind.DECODE] == [
        4,
        4,
        4,
        4,
        4,
        1,
        1,
        1,
    ]
    assert drive.tokens("a") == answer(request("a", 30, 3), drive.spec)


def test_pools_decode_in_turn_and_have_separate_queues() -> None:
    pools = (slot_pool(1, full(64), 64, "narrow"), slot_pool(2, full(64), 64, "wide"))
    drive = Drive(
        fake_spec(pools=pools, max_model_len=64), SchedulerConfig(max_num_waiting=2, max_decode_steps=1)
    )
    batches: list[Batch] = []
    submit = drive.backend.submit

    def watch(batch: Batch) -> Pending:
        batches.append(batch)
        return submit(batch)

    drive.backend.submit = watch  # type: ignore[method-assign]
    crowd = [request(f"n{number}", 4, 6) for number in range(3)]
    drive.send(*crowd, request("refused", 4, 6), replace(request("w", 4, 6), pool=1))
    drive.run()
    assert drive.final("refused").reason is FinishReason.QUEUE_FULL
    first, second = drive.final("w").timing, drive.final("n1").timing
    assert (first.admitted, drive.tokens("w")) == (0.0, answer(request("w", 4, 6), drive.spec))
    assert second.admitted is not None
    decoded = [batch.pool for batch in batches if isinstance(batch, DecodeBatch)]
    assert decoded[:10] == [0, 1] * 5
    assert [drive.tokens(add.request_id) for add in crowd] == [answer(add, drive.spec) for add in crowd]


def test_postponed_work_yields_to_requests() -> None:
    """A request that arrives during the first of three parts is served before the second."""
    drive = Drive()
    events: list[str] = []

    def use_idle_time() -> bool:
        if events.count("part") == 3:
            drive.inbox.put(Shutdown())
            return False
        events.append("part")
        if len(events) == 1:
            drive.inbox.put(request("r", max_tokens=1))
        return True

    drive.backend.use_idle_time = use_idle_time  # type: ignore[method-assign]
    running = Running(drive)
    deliver = running.deliver

    def note(outputs: list[EngineOutput], record: StepRecord) -> None:
        events.extend("answer" for output in outputs if output.final is not None)
        deliver(outputs, record)

    drive.core.run(note)
    assert events == ["part", "answer", "part", "part"]
    assert running.reasons() == {("r", 0): FinishReason.LENGTH}

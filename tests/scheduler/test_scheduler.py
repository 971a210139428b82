"""Admission, batches and ends, with no backend: batches are looked at, results are made by hand."""

import pytest

from backends.clock import VirtualClock
from backends.fake import fake_spec
from backends.interface import (
    BackendSpec,
    Batch,
    BatchResult,
    DecodeBatch,
    PrefillBatch,
    PrefillShape,
    SampledToken,
    SequencesLostError,
)
from cache.policy import snapstream
from cache.scorer import WindowScorer
from scheduler.config import SchedulerConfig
from scheduler.messages import Abort, EngineOutput, Final, Finish, FinishReason
from scheduler.scheduler import Scheduler
from scheduler.waiting import QueueOrder
from tests.scheduler.drive import Drive, answer, request

ONE_STEP = SchedulerConfig(max_decode_steps=1)
# A slot takes prompts of up to 4 + 32 = 36 tokens directly.
SNAPSTREAM = snapstream(4, 32, 28, WindowScorer(observation_window=8))


def scheduler_of(spec: BackendSpec, config: SchedulerConfig = ONE_STEP) -> tuple[Scheduler, VirtualClock]:
    clock = VirtualClock()
    return Scheduler(spec, config, clock), clock


def snapstream_spec(num_slots: int = 4, num_scratch: int = 1) -> BackendSpec:
    shapes = (PrefillShape(1, 32), PrefillShape(4, 32))
    return fake_spec(
        num_slots=num_slots,
        policy=SNAPSTREAM,
        num_scratch=num_scratch,
        max_model_len=1024,
        prefill_shapes=shapes,
    )


def result_of(batch: Batch, token_id: int = 1) -> BatchResult:
    """Each draw brings the same token."""
    if isinstance(batch, DecodeBatch):
        return BatchResult(tuple((SampledToken(token_id),) * batch.num_steps for _ in batch.rows), 0.01)
    tokens = tuple((SampledToken(token_id),) * len(row.draws) for row in batch.rows)
    scores = tuple(
        tuple(map(SampledToken, row.score.target_ids)) if row.score is not None else () for row in batch.rows
    )
    return BatchResult(tokens, 0.01, scores)


def turn(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, result_of(batch))
    scheduler.check_integrity()
    return batch


def prefill_turn(scheduler: Scheduler) -> PrefillBatch:
    batch = turn(scheduler)
    assert isinstance(batch, PrefillBatch), batch
    return batch


def decode_turn(scheduler: Scheduler) -> DecodeBatch:
    batch = turn(scheduler)
    assert isinstance(batch, DecodeBatch), batch
    return batch


def only_final(outputs: list[EngineOutput]) -> Final:
    (final,) = [output.final for output in outputs if output.final is not None]
    return final


# Refusals


def test_queue_is_bounded_beyond_the_free_slots() -> None:
    scheduler, _ = scheduler_of(fake_spec(num_slots=2), SchedulerConfig(max_num_waiting=3))
    for name in "abcd":
        scheduler.add(request(name))
    scheduler.add(request("two more", num_choices=2))
    scheduler.add(request("one more"))
    scheduler.add(request("yet another"))
    refused = [
        (output.request_id, output.final.reason)
        for output in scheduler.take_outputs()
        if output.final is not None
    ]
    assert refused == [(name, FinishReason.QUEUE_FULL) for name in ("two more", "two more", "yet another")]
    turn(scheduler)
    assert scheduler.stats().num_waiting == 3


def test_background_requests_take_no_place_in_the_queue() -> None:
    scheduler, _ = scheduler_of(
        fake_spec(num_slots=2), SchedulerConfig(max_num_waiting=1, max_background_slots=2)
    )
    for name in "abcd":
        scheduler.add(request(name, is_background=True))
    turn(scheduler)
    assert scheduler.stats().num_waiting == 2
    for name in "xyz!":  # two slots and one place to wait: three fit
        scheduler.add(request(name))
    refused = [
        (output.request_id, output.final.reason)
        for output in scheduler.take_outputs()
        if output.final is not None
    ]
    assert refused == [("!", FinishReason.QUEUE_FULL)]


# Admission


def test_background_requests_leave_slots_and_a_scratch_and_run_last() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=4, num_scratch=2))
    for name in ("long 1", "long 2"):
        scheduler.add(request(name, 100, is_background=True))
    scheduler.add(request("short", is_background=True, num_choices=4))
    turn(scheduler)
    assert sorted(live.add.request_id for live in scheduler.live()) == ["long 1", "short"]
    scheduler.add(request("long", 100))
    scheduler.add(request("quick"))
    turn(scheduler)
    assert sorted(live.add.request_id for live in scheduler.live()) == ["long", "long 1", "quick", "short"]
    scheduler.abort(Abort("quick"))
    scheduler.add(request("late"))
    turn(scheduler)
    assert "late" in [live.add.request_id for live in scheduler.live()]


def test_takes_the_lowest_free_slots_in_order() -> None:
    scheduler, _ = scheduler_of(fake_spec(num_slots=3, prefill_shapes=(PrefillShape(4, 64),)))
    for name in "abcd":
        scheduler.add(request(name))
    batch = prefill_turn(scheduler)
    assert [(row.request_id, row.slots) for row in batch.rows] == [("a", (0,)), ("b", (1,)), ("c", (2,))]
    scheduler.abort(Abort("b"))
    batch = prefill_turn(scheduler)
    assert [(row.request_id, row.slots) for row in batch.rows] == [("d", (1,))]


def test_lower_priority_values_go_first() -> None:
    scheduler, _ = scheduler_of(fake_spec(num_slots=1), SchedulerConfig(order=QueueOrder.PRIORITY))
    for name, priority in (("first", 0), ("low", 5), ("high", -1), ("high too", -1)):
        scheduler.add(request(name, max_tokens=1, priority=priority))
    assert [prefill_turn(scheduler).rows[0].request_id for _ in range(4)] == [
        "high",
        "high too",
        "first",
        "low",
    ]


def test_a_short_prompt_passes_a_long_one_that_waits_for_a_scratch() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=2))
    scheduler.add(request("long", 100))
    scheduler.add(request("long too", 100))
    scheduler.add(request("short", 10))
    assert prefill_turn(scheduler).rows[0].request_id == "long"
    assert prefill_turn(scheduler).rows[0].request_id == "short"
    assert scheduler.stats().num_waiting == 1


def test_a_prompt_that_waits_for_a_slot_keeps_its_scratch() -> None:
    """Scored sequences need no slot. They must not take the scratch from an earlier sequence."""
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=1))
    scheduler.add(request("short", 10, max_tokens=3))
    scheduler.add(request("long", 36, max_tokens=2))
    scheduler.add(request("scored", 10, max_tokens=0))
    order = [
        row.request_id
        for batch in iter_turns(scheduler)
        if isinstance(batch, PrefillBatch)
        for row in batch.rows
    ]
    assert order == ["short", "scored", "long", "long"]  # 36 tokens need no scratch
    scheduler.add(request("short", 10, max_tokens=3))
    scheduler.add(request("long", 100, max_tokens=2))
    scheduler.add(request("scored", 10, max_tokens=0))
    order = [
        row.request_id
        for batch in iter_turns(scheduler)
        if isinstance(batch, PrefillBatch)
        for row in batch.rows
    ]
    assert order == ["short", *["long"] * 4, "scored"]


def iter_turns(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(turn(scheduler))
    return batches


# Reading prompts


def test_a_long_prompt_is_read_in_chunks_through_scratch() -> None:
    scheduler, _ = scheduler_of(snapstream_spec())
    add = request("a", 100)
    scheduler.add(add)
    rows = [prefill_turn(scheduler).rows[0] for _ in range(4)]
    assert [(row.start, len(row.token_ids), row.scratch, row.is_last) for row in rows] == [
        (0, 32, 0, False),
        (32, 32, 0, False),
        (64, 32, 0, False),
        (96, 4, 0, True),
    ]
    assert sum((row.token_ids for row in rows), ()) == add.prompt_token_ids
    assert [output.num_computed_prompt_tokens for output in scheduler.take_outputs()] == [0, 32, 64, 96, 100]
    assert scheduler.stats().num_scratch_in_use == 0
    (row,) = decode_turn(scheduler).rows
    assert (row.index, row.num_prompt_tokens, row.token_id, row.draw.output_index) == (100, 100, 1, 1)


def test_short_prompts_share_a_batch() -> None:
    scheduler, _ = scheduler_of(snapstream_spec())
    for name in "abcd":
        scheduler.add(request(name, 20))
    batch = prefill_turn(scheduler)
    assert (batch.shape, len(batch.rows)) == (PrefillShape(4, 32), 4)


def test_a_lone_short_prompt_takes_the_smallest_shape() -> None:
    scheduler, _ = scheduler_of(snapstream_spec())
    scheduler.add(request("a", 20))
    assert prefill_turn(scheduler).shape == PrefillShape(1, 32)


def test_rows_with_and_without_scratch_are_read_in_turns() -> None:
    scheduler, _ = scheduler_of(snapstream_spec())
    scheduler.add(request("long", 500))
    scheduler.add(request("short", 36, max_tokens=1))
    turns = [prefill_turn(scheduler).rows[0].request_id for _ in range(4)]
    assert turns == ["long", "short", "long", "short"]
    assert only_final(scheduler.take_outputs()).reason is FinishReason.LENGTH


def test_alike_prompts_are_read_one_after_the_other() -> None:
    """Side by side, each would wait for both."""
    scheduler, _ = scheduler_of(
        fake_spec(policy=SNAPSTREAM, num_scratch=2, max_model_len=1024, prefill_shapes=(PrefillShape(1, 32),))
    )
    for name in ("first", "second"):
        scheduler.add(request(name, 96, max_tokens=1))
    assert [prefill_turn(scheduler).rows[0].request_id for _ in range(6)] == ["first"] * 3 + ["second"] * 3


def test_prompt_logprobs_are_complete_and_only_in_choice_0() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=2))
    add = request("a", 70, max_tokens=1, num_choices=2, num_prompt_logprobs=0)
    scheduler.add(add)
    iter_turns(scheduler)
    outputs = scheduler.take_outputs()
    assert [(output.choice, len(output.prompt_logprobs)) for output in outputs if output.prompt_logprobs] == [
        (0, 69)
    ]
    (scored,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert tuple(token.token_id for token in scored) == add.prompt_token_ids[1:]


def test_a_prompt_read_again_for_its_other_choices_is_not_scored_again() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=2))
    scheduler.add(request("a", 10, max_tokens=1, num_choices=5, num_prompt_logprobs=0))
    rows = [row for batch in iter_turns(scheduler) if isinstance(batch, PrefillBatch) for row in batch.rows]
    assert [(len(row.slots), row.score is not None) for row in rows] == [(2, True), (2, False), (1, False)]


def test_a_scored_prompt_takes_a_scratch_and_no_slot() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=1))
    scheduler.add(request("busy", 10, max_tokens=50))
    prefill_turn(scheduler)
    scheduler.take_outputs()
    scheduler.add(request("scored", 10, max_tokens=0, num_prompt_logprobs=1))
    (row,) = prefill_turn(scheduler).rows
    assert (row.slots, row.scratch, row.draws) == ((), 0, ())
    accepted, last = scheduler.take_outputs()
    assert accepted == EngineOutput("scored", 0)
    assert len(last.prompt_logprobs) == 9
    assert last.final is not None
    assert (last.final.reason, last.final.num_output_tokens, last.final.cache) == (
        FinishReason.LENGTH,
        0,
        None,
    )


# Several choices


def test_one_reading_packs_into_every_free_slot_and_the_rest_queues() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=3))
    scheduler.add(request("a", 10, max_tokens=2, num_choices=5))
    (row,) = prefill_turn(scheduler).rows
    assert row.slots == (0, 1, 2)
    assert [(draw.choice, draw.output_index) for draw in row.draws] == [(0, 0), (1, 0), (2, 0)]
    assert scheduler.stats().num_waiting == 2
    iter_turns(scheduler)
    finals = [output for output in scheduler.take_outputs() if output.final is not None]
    assert sorted(output.choice for output in finals) == [0, 1, 2, 3, 4]


def test_a_choice_that_leaves_while_the_prompt_is_read_gives_its_slot_back() -> None:
    scheduler, _ = scheduler_of(snapstream_spec(num_slots=2))
    scheduler.add(request("a", 100, num_choices=2))
    prefill_turn(scheduler)
    scheduler.finish(Finish("a", 0, 0))
    scheduler.check_integrity()
    (row,) = prefill_turn(scheduler).rows
    assert (row.start, row.slots) == (32, (1,))
    scheduler.finish(Finish("a", 1, 0))
    scheduler.check_integrity()
    assert (scheduler.stats().num_slots_in_use, scheduler.stats().num_scratch_in_use) == (0, 0)
    assert scheduler.schedule() is None


def test_a_prompt_that_is_read_into_the_first_choice_s_slot_survives_its_end() -> None:
    drive = Drive(fake_spec(num_slots=2, prefill_shapes=(PrefillShape(1, 32),)), ONE_STEP)
    add = request("a", 100, num_choices=2)
    drive.send(add)
    drive.step()
    drive.send(Finish("a", 0, 0), request("b", 10))  # takes the slot that the first choice leaves
    drive.run()
    assert drive.tokens("a", 1) == answer(add, drive.spec, choice=1)
    assert drive.tokens("b") == answer(request("b", 10), drive.spec)


# The end


def test_abort_frees_the_slot_for_the_next_step() -> None:
    scheduler, _ = scheduler_of(fake_spec(num_slots=1))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    turn(scheduler)
    scheduler.abort(Abort("a"))
    assert prefill_turn(scheduler).rows[0].request_id == "b"
    assert only_final(scheduler.take_outputs()).reason is FinishReason.ABORT


def test_finish_keeps_the_first_tokens_and_counts_the_rest() -> None:
    scheduler, _ = scheduler_of(fake_spec())
    scheduler.add(request("a", max_tokens=50))
    for _ in range(6):
        turn(scheduler)
    scheduler.finish(Finish("a", 0, 4))
    final = only_final(scheduler.take_outputs())
    assert (final.reason, final.num_output_tokens, final.num_discarded_tokens) == (FinishReason.STOP, 4, 2)
    assert scheduler.stats().num_discarded_tokens == 2


def test_late_messages_are_ignored() -> None:
    scheduler, _ = scheduler_of(fake_spec())
    scheduler.add(request("a", max_tokens=1))
    iter_turns(scheduler)
    scheduler.take_outputs()
    scheduler.finish(Finish("a", 0, 0))
    scheduler.abort(Abort("a"))
    scheduler.abort(Abort("never heard of"))
    assert scheduler.take_outputs() == []


@pytest.mark.parametrize("now", [1.9, 2.0])
def test_the_queue_deadline_ends_only_waiting_requests(now: float) -> None:
    scheduler, clock = scheduler_of(fake_spec(num_slots=1))
    scheduler.add(request("a", max_tokens=50, num_choices=2, queue_timeout=2.0))
    turn(scheduler)
    clock.elapse(now)
    scheduler.expire()
    finals = [
        (output.choice, output.final.reason)
        for output in scheduler.take_outputs()
        if output.final is not None
    ]
    assert finals == ([(1, FinishReason.QUEUE_TIMEOUT)] if now >= 2.0 else [])
    scheduler.check_integrity()


def test_total_deadline_ends_everything() -> None:
    scheduler, clock = scheduler_of(snapstream_spec(num_slots=2))
    scheduler.add(request("a", 100, num_choices=3, timeout=0.1 + 0.2))
    prefill_turn(scheduler)
    clock.elapse(0.1)
    clock.elapse(0.2)
    scheduler.expire()
    finals = [output.final for output in scheduler.take_outputs() if output.final is not None]
    assert [final.reason for final in finals] == [FinishReason.TIMEOUT] * 3
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_a_deadline_outlived_by_its_id_means_nothing() -> None:
    scheduler, clock = scheduler_of(fake_spec())
    scheduler.add(request("a", max_tokens=1, timeout=1.0))
    iter_turns(scheduler)
    scheduler.add(request("a", max_tokens=50))
    turn(scheduler)
    clock.elapse(5.0)
    scheduler.expire()
    assert scheduler.has_work


@pytest.mark.parametrize("num_turns", [0, 1])  # a prefill, a decode
def test_a_failed_step_ends_the_sequences_of_its_batch(num_turns: int) -> None:
    scheduler, _ = scheduler_of(fake_spec(num_slots=2))
    scheduler.add(request("a", num_choices=3))
    for _ in range(num_turns):
        turn(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.fail(batch, SequencesLostError("out of order")) == 2
    scheduler.check_integrity()
    finals = [
        (output.choice, output.final) for output in scheduler.take_outputs() if output.final is not None
    ]
    assert [(choice, final.reason, final.message) for choice, final in finals] == [
        (0, FinishReason.ERROR, "out of order"),
        (1, FinishReason.ERROR, "out of order"),
    ]
    iter_turns(scheduler)
    assert only_final(scheduler.take_outputs()).reason is FinishReason.LENGTH


def test_timing_is_of_the_clock() -> None:
    scheduler, clock = scheduler_of(fake_spec())
    clock.elapse(1.0)
    scheduler.add(request("a", max_tokens=2, arrival_time=0.5))
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        clock.elapse(1.0)
        scheduler.update(batch, result_of(batch))
    timing = only_final(scheduler.take_outputs()).timing
    assert (timing.arrival, timing.admitted, timing.first_token, timing.finished) == (0.5, 1.0, 2.0, 3.0)

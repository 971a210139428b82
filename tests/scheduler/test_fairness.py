"""Turns between tenants: the counters by themselves, and what they do to waiting times on a virtual clock."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.fake import fake_spec, slot_pool
from backends.interface import BackendError, Batch, DecodeBatch, PrefillBatch, PrefillShape
from cache.policy import full, snapstream
from cache.scorer import WindowScorer
from scheduler.config import SchedulerConfig
from scheduler.fairness import (
    INPUT_WEIGHT,
    MAX_ABSENT,
    MAX_SAVED,
    OUTPUT_WEIGHT,
    PRESENCE,
    DeviceTurns,
    TokenCounters,
)
from scheduler.messages import Abort, AdmittedAdd, ServedElsewhere
from scheduler.request import Request
from scheduler.stats import StepKind
from scheduler.waiting import QueueOrder, WaitingQueue
from tests.scheduler.drive import Drive, answer, request

NUM_SLOTS = 2
MAX_PROMPT, MAX_OUTPUT = 40, 12


def step_time(batch: Batch) -> float:
    return 0.01 * batch.num_steps if isinstance(batch, DecodeBatch) else 0.02


def drive_of(order: QueueOrder = QueueOrder.FAIR) -> Drive:
    return Drive(
        fake_spec(num_slots=NUM_SLOTS),
        SchedulerConfig(order=order, max_num_waiting=1000, max_decode_steps=1),
        step_time=step_time,
    )


def admissions(drive: Drive) -> list[str]:
    """Requests in the order in which they got a slot."""
    times = {name: drive.final(name).timing.admitted for name, _ in drive.outputs}
    return sorted(
        (name for name, time in times.items() if time is not None), key=lambda name: times[name] or 0.0
    )


def test_a_returning_tenant_is_lifted_to_the_lowest_waiting_one() -> None:
    counters = TokenCounters()
    counters.join("a")
    counters.charge("a", num_input=10, num_output=5)
    counters.join("b")
    assert counters["a"] == counters["b"] == 10 * INPUT_WEIGHT + 5 * OUTPUT_WEIGHT
    counters.charge("b", num_input=100)
    counters.leave("a")
    counters.join("a")
    assert counters["a"] == counters["b"]


def test_an_empty_queue_is_no_occasion_to_start_over() -> None:
    counters = TokenCounters()
    for tenant in ("a", "b"):
        counters.join(tenant)
        counters.charge(tenant, num_input=50)
        counters.leave(tenant)
    counters.join("new")
    assert counters["new"] == counters["b"] > 0


def test_an_output_token_costs_as_much_as_two_input_tokens() -> None:
    counters = TokenCounters()
    counters.join("a")
    counters.charge("a", num_output=5)
    assert counters["a"] == 10


def test_a_tenant_is_charged_for_requests_that_left_the_queue() -> None:
    counters = TokenCounters()
    counters.join("a")
    counters.leave("a")
    counters.charge("a", num_input=7)
    assert counters["a"] == 7


def test_tokens_that_other_replicas_served_cost_turns_here() -> None:
    drive = drive_of()
    drive.run(
        *(request(f"first{number}", tenant="other", max_tokens=4) for number in range(NUM_SLOTS)),
        *(request(name, tenant=name.rstrip("2"), max_tokens=4) for name in ("busy", "busy2", "idle")),
        ServedElsewhere({"busy": 1000, "unknown": 5}),
    )
    order = admissions(drive)
    assert order.index("idle") < order.index("busy") < order.index("busy2")


def test_the_tenants_that_left_first_are_forgotten() -> None:
    counters = TokenCounters()
    tenants = [str(index) for index in range(2 * MAX_ABSENT)]
    for tenant in tenants:
        counters.join(tenant)
        counters.charge(tenant, num_input=1)
        counters.leave(tenant)
        counters.charge(tenant, num_output=1)  # still running
    assert [counters[tenant] > 0 for tenant in tenants] == [False] * MAX_ABSENT + [True] * MAX_ABSENT
    assert sum(map(len, vars(counters).values())) <= 2 * MAX_ABSENT + 1


def test_a_tenant_is_present_for_a_while_after_its_last_sequence() -> None:
    turns = DeviceTurns()
    turns.enter("a", now=0.0)
    assert not turns.has_others("a", now=0.0)
    assert turns.has_others("b", now=0.0)
    turns.enter("a", now=0.0)
    turns.leave("a", now=1.0)
    turns.leave("a", now=2.0)
    assert turns.has_others("b", now=2.0 + 0.9 * PRESENCE)
    assert not turns.has_others("b", now=2.0 + 1.1 * PRESENCE)
    assert not any(vars(turns).values())


def test_a_flood_yields_to_fewer_sequences_until_they_had_as_much_time() -> None:
    turns = DeviceTurns()
    for tenant in ("flood", "flood", "few"):
        turns.enter(tenant, now=0.0)
    turns.charge(["flood", "flood"], 1.0)
    assert turns.yields("flood", ["flood", "few"])
    assert not turns.yields("few", ["flood", "few"])
    assert not turns.yields("flood", ["flood"])
    turns.charge(["flood", "few", "few"], 1.5)
    assert turns.yields("flood", ["few"])
    turns.charge(["few"], 0.5)
    assert not turns.yields("flood", ["few"])


def test_a_tenant_that_enters_saved_up_no_time() -> None:
    turns = DeviceTurns()
    turns.enter("busy", now=0.0)
    turns.enter("busy", now=0.0)
    turns.charge(["busy"], 10.0)
    turns.enter("new", now=0.0)
    assert not turns.yields("busy", ["new"])


def test_a_present_tenant_saves_up_a_little() -> None:
    turns = DeviceTurns()
    for _ in range(2):
        turns.enter("flood", now=0.0)
    turns.enter("few", now=0.0)
    turns.leave("few", now=0.0)
    turns.charge(["flood"], 10.0)
    turns.enter("few", now=10.0)
    turns.charge(["few"], MAX_SAVED - 0.01)
    assert turns.yields("flood", ["few"])
    turns.charge(["few"], 0.02)
    assert not turns.yields("flood", ["few"])


def test_a_present_tenant_that_had_less_time_is_expected() -> None:
    turns = DeviceTurns()
    for tenant in ("few", "flood"):
        turns.enter(tenant, now=0.0)
    turns.leave("few", now=1.0)
    assert not turns.expects_other("flood", now=1.0), "both had no time yet"
    turns.charge(["flood"], 2.0)
    assert turns.expects_other("flood", now=1.0 + 0.9 * PRESENCE)
    assert turns.expects_other("one that has only background sequences", now=2.0)
    assert not turns.expects_other("flood", now=1.0 + 1.1 * PRESENCE)


def test_a_tenant_that_is_here_is_not_expected() -> None:
    turns = DeviceTurns()
    for tenant in ("few", "flood"):
        turns.enter(tenant, now=0.0)
    turns.charge(["flood"], 2.0)
    assert not turns.expects_other("flood", now=0.0)


def test_a_tenant_owes_nothing_for_a_time_in_which_it_was_alone() -> None:
    turns = DeviceTurns()
    turns.enter("alone", now=0.0)
    turns.charge(["alone"], 1000.0)
    turns.leave("alone", now=1000.0)
    turns.enter("new", now=1001.0)
    for _ in range(2):
        turns.enter("alone", now=1001.0)
    assert not turns.yields("alone", ["new"])


def test_absent_tenants_are_forgotten() -> None:
    turns = DeviceTurns()
    for index in range(100):
        turns.enter(str(index), now=10.0 * index)
        turns.leave(str(index), now=10.0 * index)
    assert all(len(state) <= PRESENCE / 10 + 1 for state in vars(turns).values())


@pytest.mark.parametrize("is_background", [False, True])
def test_prompts_wait_for_no_answer_in_the_background(is_background: bool) -> None:
    drive = Drive(fake_spec(), SchedulerConfig(max_decode_steps=1), step_time=step_time)
    drive.send(*(request(f"busy{i}", 10, 500, tenant="busy") for i in range(3)))
    for _ in range(20):
        drive.step()
    drive.send(request("other", 10, 500, tenant="other", is_background=is_background))
    for _ in range(20):
        drive.step()
    arrival = drive.clock.now()
    drive.run(request("next", 10, 1, tenant="busy", arrival_time=arrival))
    first_token = drive.final("next").timing.first_token
    assert first_token is not None
    assert (first_token - arrival < 0.1) == is_background


def flooded(order: QueueOrder) -> tuple[list[float], float]:
    """Return the light tenant's seconds a request beside a flood of long prompts, and the run's seconds.

    Alone, a light request takes 0.07 s: 0.02 s for its prompt and the first token, and 5 steps of 0.01 s.
    """
    drive = Drive(
        fake_spec(num_slots=4, prefill_shapes=(PrefillShape(1, 64), PrefillShape(4, 64))),
        SchedulerConfig(order=order, max_decode_steps=1),
        step_time=lambda batch: (
            step_time(batch) * (batch.shape.num_rows if isinstance(batch, PrefillBatch) else 1)
        ),
    )
    drive.run(request("known", 10, 1, tenant="light"))
    drive.send(*(request(f"h{i}", 1000, 50, tenant="heavy") for i in range(40)))
    drive.step()
    seconds = []
    for index in range(10):
        arrival = drive.clock.now()
        drive.send(request(f"l{index}", 10, 6, tenant="light", arrival_time=arrival))
        while not any(output.final for output in drive.outputs.get((f"l{index}", 0), ())):
            drive.step()
        seconds.append(drive.clock.now() - arrival)
    drive.run()
    return seconds, drive.clock.now()


def test_beside_a_flood_another_tenant_has_half_of_the_device() -> None:
    fair, fair_end = flooded(QueueOrder.FAIR)
    in_order, in_order_end = flooded(QueueOrder.FCFS)
    assert max(fair) <= 2 * 0.07 + 0.08 + 1e-9  # and a step of four rows that was under way
    assert in_order[0] > 10  # it waits for the whole flood
    assert fair_end <= 1.15 * in_order_end  # meanwhile the flood has three slots instead of four


@pytest.mark.parametrize("pause", [0.1, 1.0])
def test_a_tenant_that_pauses_hardly_waits_for_a_flood(pause: float) -> None:
    drive = Drive(
        fake_spec(num_slots=4, prefill_shapes=(PrefillShape(1, 64), PrefillShape(1, 256))),
        SchedulerConfig(max_decode_steps=1),
        step_time=by_rows,
    )
    drive.run(request("known", 10, 1, tenant="light"))
    drive.send(*(request(f"h{i}", 1000, 50, tenant="heavy") for i in range(80)))
    seconds = []
    for index in range(20):
        end = drive.clock.now() + pause
        while drive.clock.now() < end:
            drive.step()
        arrival = drive.clock.now()
        drive.send(request(f"l{index}", 10, 11, tenant="light", arrival_time=arrival))
        while not any(output.final for output in drive.outputs.get((f"l{index}", 0), ())):
            drive.step()
        seconds.append(drive.clock.now() - arrival)
    assert statistics.median(seconds) <= 1.5 * (0.02 + 10 * 0.008)


@pytest.mark.parametrize(("overhead", "num_tokens"), [(0.01, 64), (0.1, 256)])
def test_steps_are_brief_while_another_tenant_is_expected(overhead: float, num_tokens: int) -> None:
    """64 tokens a step are read at 0.90 and 0.54 of the rate of 256. A shape never timed gets a trial."""
    drive = Drive(
        fake_spec(
            num_slots=4, max_model_len=4096, prefill_shapes=(PrefillShape(1, 64), PrefillShape(1, 256))
        ),
        SchedulerConfig(max_decode_steps=1),
        step_time=lambda batch: (
            overhead + 0.001 * batch.shape.num_tokens if isinstance(batch, PrefillBatch) else 0.01
        ),
    )

    def usual_size(name: str) -> int:
        drive.batches.clear()
        drive.run(request(name, 1024, 1, tenant="heavy", arrival_time=drive.clock.now()))
        return statistics.mode(batch.num_tokens for batch in drive.batches)

    drive.run(*(request(f"known {size}", size, 1, tenant="light") for size in (64, 256)))
    for name in ("first", "second"):
        usual_size(name)
    assert usual_size("beside") == num_tokens
    drive.clock.elapse(PRESENCE)
    assert usual_size("alone") == 256


def test_many_tenants_that_return_starve_no_flood() -> None:
    drive = Drive(
        fake_spec(num_slots=8, prefill_shapes=(PrefillShape(1, 64),)),
        SchedulerConfig(max_decode_steps=1, max_num_waiting=2000),
        step_time=by_rows,
    )
    lights = [f"{tenant}-{index}" for index in range(70) for tenant in range(12)]
    drive.send(*(request(f"h{i}", 640, 20, tenant="heavy") for i in range(2)))
    drive.run(*(request(name, 10, 5, tenant=name.partition("-")[0]) for name in lights))
    last = max(drive.final(name).timing.finished for name in lights)
    assert all(drive.final(f"h{i}").timing.finished < 0.7 * last for i in range(2))


def test_a_flood_goes_on_beside_a_tenant_that_always_decodes() -> None:
    drive = Drive(
        fake_spec(num_slots=4, prefill_shapes=(PrefillShape(1, 64),)),
        SchedulerConfig(max_decode_steps=1),
        step_time=step_time,
    )
    drive.send(request("stream", 10, 1000, tenant="light"))
    drive.step()
    drive.send(*(request(f"h{i}", 1000, 50, tenant="heavy") for i in range(4)))
    drive.run()
    assert drive.final("h3").timing.finished < drive.final("stream").timing.finished


def by_rows(batch: Batch) -> float:
    """A device whose decode steps take longer with each row."""
    if isinstance(batch, PrefillBatch):
        return 0.02
    return batch.num_steps * (0.004 + 0.004 * len(batch.rows))


def beside_answers(order: QueueOrder, decode_time: Callable[[Batch], float]) -> tuple[float, Drive]:
    """Return the light tenant's seconds for 40 short requests beside three long answers, and the run."""
    drive = Drive(
        fake_spec(num_slots=4, max_model_len=4096),
        SchedulerConfig(order=order, max_decode_steps=4, max_inter_token_latency=0.05),
        step_time=decode_time,
    )
    floods = [request(f"h{i}", 10, 900, tenant="heavy") for i in range(3)]
    drive.send(*floods)
    for _ in range(10):
        drive.step()
    start = drive.clock.now()
    lights = [request(f"l{index}", 10, 10, tenant="light") for index in range(40)]
    for light in lights:
        drive.send(light)
        while not any(output.final for output in drive.outputs.get((light.request_id, 0), ())):
            drive.step()
    seconds = drive.clock.now() - start
    drive.run()
    for add in (*floods, *lights):
        assert drive.tokens(add.request_id) == answer(add, drive.spec), "no token is lost"
    return seconds, drive


def longest_gap(drive: Drive, name: str) -> float:
    """Return the longest time between two tokens, without the first ones: times are not known yet."""
    return max(after - before for before, after in pairwise(drive.token_times[name, 0][8:]))


def test_the_rows_of_a_flood_skip_steps_for_a_tenant_with_less_time() -> None:
    fair, drive = beside_answers(QueueOrder.FAIR, by_rows)
    in_order, _ = beside_answers(QueueOrder.FCFS, by_rows)
    alone = 40 * (0.02 + 9 * 0.008)
    assert fair < 1.8 * alone
    assert in_order > 2.1 * alone
    # A light prompt, and a step of each kind, may come on top of the bound.
    assert max(longest_gap(drive, f"h{i}") for i in range(3)) <= 0.05 + 0.02 + 0.02 + 1e-9


def test_no_row_skips_steps_for_nothing() -> None:
    """Where a step takes as long without the others, they take all but a few trials."""
    fair, fair_drive = beside_answers(QueueOrder.FAIR, step_time)
    in_order, in_order_drive = beside_answers(QueueOrder.FCFS, step_time)
    assert fair <= 1.01 * in_order
    assert fair_drive.clock.now() <= 1.05 * in_order_drive.clock.now()


def test_skipped_steps_respect_the_time_between_tokens() -> None:
    """The flood was charged for a long prompt, but it waits for no longer than the bound."""
    drive = Drive(
        fake_spec(num_slots=4, prefill_shapes=(PrefillShape(1, 64),), max_model_len=4096),
        SchedulerConfig(max_decode_steps=1, max_inter_token_latency=0.05),
        step_time=by_rows,
    )
    drive.send(request("light", 10, 500, tenant="light"))
    drive.step()
    drive.send(*(request(f"h{i}", 2000, 100, tenant="heavy") for i in range(2)))
    drive.run()
    assert longest_gap(drive, "h0") <= 0.05 + 0.02 + 1e-9
    assert longest_gap(drive, "h1") <= 0.05 + 1e-9


def beside_another_pool(bound: float) -> float:
    """Return the longest gap of a flood that was charged for long prompts, while a third tenant decodes."""
    pools = (slot_pool(4, full(4096), 4096, "one"), slot_pool(4, full(4096), 4096, "other"))
    drive = Drive(
        fake_spec(pools=pools, prefill_shapes=(PrefillShape(1, 64),)),
        SchedulerConfig(max_inter_token_latency=bound),
        step_time=by_rows,
    )
    drive.send(
        request("light", 10, 500, tenant="light"),
        *(replace(request(f"t{i}", 10, 500, tenant="third"), pool=1) for i in range(3)),
    )
    for _ in range(6):
        drive.step()
    drive.send(*(request(f"h{i}", 2000, 100, tenant="heavy") for i in range(2)))
    drive.run()
    return max(longest_gap(drive, "h0"), longest_gap(drive, "h1"))


def test_steps_of_another_pool_do_not_extend_the_time_between_tokens() -> None:
    assert beside_another_pool(0.1) <= 0.1 + 1e-9


def test_without_a_bound_no_row_skips_steps() -> None:
    assert beside_another_pool(float("inf")) <= 4 * (0.016 + 0.016) + 1e-9  # a launch of each pool


def test_no_row_skips_steps_while_a_prompt_is_read() -> None:
    """Prefill would get less of a gap that skipped steps make longer.

    Three chunks of 0.05 s leave 0.05 of a gap of 0.2, and a step of four rows takes 0.02.
    """
    drive = Drive(
        fake_spec(num_slots=8, max_model_len=4096, prefill_shapes=(PrefillShape(1, 64),)),
        SchedulerConfig(max_decode_steps=1),
        step_time=lambda batch: 0.05 if isinstance(batch, PrefillBatch) else by_rows(batch),
    )
    drive.send(
        *(request(f"h{i}", 10, 3000, tenant="heavy") for i in range(3)),
        request("light", 10, 3000, tenant="light"),
    )
    for _ in range(100):
        drive.step()
    assert {1, 4} <= {batch.num_rows for batch in drive.batches}
    drive.batches.clear()
    drive.send(request("third", 4000, 1, tenant="third"))
    while ("third", 0) not in drive.token_times:
        drive.step()
    assert {batch.num_rows for batch in drive.batches if batch.kind is StepKind.DECODE} == {4}


def test_a_retry_is_no_trial_of_a_step_without_some_rows() -> None:
    """The rows of a failed step decode alone, which is fast here. Later steps take as long without some."""
    seconds = 0.001
    drive = Drive(
        fake_spec(num_slots=4),
        SchedulerConfig(max_decode_steps=1),
        step_time=lambda batch: seconds if len(batch.rows) == 1 else 0.01,
        faults={10: BackendError("a bit flipped")},
    )
    drive.send(*(request(f"h{i}", 10, 500, tenant="heavy") for i in range(3)))
    for _ in range(20):
        drive.step()
    assert [batch.num_rows for batch in drive.batches].count(1) >= 3
    drive.send(request("light", 10, 500, tenant="light"))
    drive.batches.clear()
    seconds = 0.01
    for _ in range(40):
        drive.step()
    num_partial = sum(batch.kind is StepKind.DECODE and batch.num_rows == 1 for batch in drive.batches)
    assert num_partial == 1


sizes = st.tuples(st.integers(1, MAX_PROMPT), st.integers(1, MAX_OUTPUT))


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=100, max_size=100), sizes, st.integers(0, 60))
def test_a_light_tenant_waits_for_one_slot_only(
    heavy: list[tuple[int, int]], light: tuple[int, int], num_steps: int
) -> None:
    drive = drive_of()
    drive.send(*(request(f"h{i}", *size, tenant="heavy") for i, size in enumerate(heavy)))
    for _ in range(num_steps):
        drive.step()
    arrival = drive.clock.now()
    drive.run(request("light", *light, tenant="light", arrival_time=arrival))
    admitted = drive.final("light").timing.admitted
    assert admitted is not None
    overtaking = [
        name
        for name in admissions(drive)
        if name != "light" and arrival < (drive.final(name).timing.admitted or 0.0) < admitted
    ]
    assert len(overtaking) <= NUM_SLOTS
    longest = MAX_OUTPUT * 0.01 + 2 * NUM_SLOTS * 0.02  # a whole answer, and prompts read in between
    assert admitted - arrival <= 2 * longest


def test_first_come_first_served_lets_the_light_tenant_wait_for_all() -> None:
    """What the fair order is for: the same traffic without it."""
    drive = drive_of(QueueOrder.FCFS)
    drive.run(*(request(f"h{i}", tenant="heavy") for i in range(100)), request("light", tenant="light"))
    assert admissions(drive)[-1] == "light"


def test_with_one_tenant_the_fair_order_is_first_come_first_served() -> None:
    orders = []
    for order in (QueueOrder.FAIR, QueueOrder.FCFS):
        drive = drive_of(order)
        drive.run(*(request(f"r{i}", 1 + 7 * i % 40, 1 + 5 * i % 12, tenant="one") for i in range(50)))
        orders.append(admissions(drive))
    assert orders[0] == orders[1]


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), sizes, min_size=2), st.integers(50, 150))
@example({"a": (1, 1), "b": (11, 1)}, 132)  # the shortest requests: the most of them are served
def test_backlogged_tenants_get_equal_service(shapes: dict[str, tuple[int, int]], num_steps: int) -> None:
    """Theorem 4.4 of the paper: two backlogged tenants differ by at most 2 × max(a prompt, a full batch)."""
    drive = drive_of()
    num_requests = NUM_SLOTS * (
        num_steps + 1
    )  # a step starts one in every slot at most: no tenant runs out of them
    drive.send(
        *(
            request(f"{tenant}{i}", *size, tenant=tenant)
            for i in range(num_requests)
            for tenant, size in shapes.items()
        )
    )
    for _ in range(num_steps):
        drive.step()
    served = dict.fromkeys(shapes, 0)
    for (name, _), outputs in drive.outputs.items():
        num_tokens = sum(len(output.tokens) for output in outputs)
        num_read = max(output.num_computed_prompt_tokens for output in outputs)
        served[name[0]] += INPUT_WEIGHT * num_read + OUTPUT_WEIGHT * num_tokens
    bound = 2 * max(INPUT_WEIGHT * MAX_PROMPT, OUTPUT_WEIGHT * NUM_SLOTS * MAX_OUTPUT)
    assert (
        max(served.values()) - min(served.values()) <= bound + NUM_SLOTS * INPUT_WEIGHT * MAX_PROMPT
    )  # charged ahead, at admission


def test_tokens_are_charged_as_generated_and_not_as_requested() -> None:
    """Both ask for the same; the answers of one end early, so it gets more of them."""
    drive = drive_of()
    stops: dict[str, frozenset[int]] = {"brief": frozenset(range(512)), "long": frozenset()}
    for i in range(60):
        drive.send(
            *(
                request(f"{name}{i}", 10, MAX_OUTPUT, tenant=name, stop_token_ids=stop)
                for name, stop in stops.items()
            )
        )
    drive.run()
    order = admissions(drive)[:60]
    num_brief, num_long = (sum(name.startswith(tenant) for name in order) for tenant in ("brief", "long"))
    each_brief, each_long = (
        10 * INPUT_WEIGHT + 1 * OUTPUT_WEIGHT,
        10 * INPUT_WEIGHT + MAX_OUTPUT * OUTPUT_WEIGHT,
    )
    assert abs(num_brief * each_brief - num_long * each_long) <= 2 * NUM_SLOTS * each_long


def test_a_prompt_is_charged_as_far_as_it_was_read() -> None:
    """A tenant that aborts a long prompt early waits no longer than for what was read."""
    spec = fake_spec(num_slots=1, prefill_shapes=(PrefillShape(1, 16),))
    drive = Drive(spec, step_time=step_time)
    drive.send(request("aborted", 200, 5, tenant="a"), request("a1", 10, 5, tenant="a"))
    drive.send(*(request(name, 100, 1, tenant="b") for name in ("b1", "b2")))
    drive.step()
    drive.run(Abort("aborted"))
    assert admissions(drive) == ["aborted", "b1", "a1", "b2"]


def scratches_of_a_flood(*known: AdmittedAdd) -> int:
    """Return how many of two scratches a flood of long prompts holds after these requests."""
    policy = snapstream(4, 32, 28, WindowScorer(observation_window=8))
    drive = Drive(fake_spec(policy=policy, num_scratch=2, prefill_shapes=(PrefillShape(1, 64),)))
    drive.run(*known)
    drive.send(*(request(f"h{i}", 1000, 5, tenant="heavy") for i in range(4)))
    drive.step()
    return drive.scheduler.stats().num_scratch_in_use


def test_a_flood_leaves_a_scratch_to_a_tenant_that_was_here() -> None:
    assert scratches_of_a_flood() == 2
    assert scratches_of_a_flood(request("known", 10, 1, tenant="light")) == 1


def test_a_tenant_leaves_its_turn_to_one_whose_counter_it_would_reach() -> None:
    queue = WaitingQueue(QueueOrder.FAIR)
    others = request("other", tenant="b")
    for arrival, add in enumerate((request("a", tenant="a"), others)):
        queue.push(Request(add, 0, False, arrival))
    queue.charge(others, num_input=5)
    assert not queue.leaves_turn(request("short", 4, tenant="a"))
    assert queue.leaves_turn(request("equal", 5, tenant="a"))

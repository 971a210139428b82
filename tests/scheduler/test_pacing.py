"""Neither prefill nor decode starves: a bound on the time between tokens, on a virtual clock."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from backends.fake import fake_spec, slot_pool
from backends.interface import Batch, DecodeBatch, DecodeRow, Draw, PrefillBatch, PrefillShape
from cache.policy import snapstream
from cache.scorer import WindowScorer
from cache.scratch import ScratchLayout
from scheduler.config import SchedulerConfig
from scheduler.pacing import Pacing
from scheduler.prefill import Prefill
from scheduler.request import Request
from scheduler.stats import StepKind
from tests.scheduler.drive import GREEDY, Drive, request

SHAPES = (PrefillShape(1, 32), PrefillShape(4, 32), PrefillShape(1, 256), PrefillShape(1, 1024))
SECONDS_PER_TOKEN = 5e-4
SECONDS_PER_DECODE = 0.01
LAYOUT = ScratchLayout(512)
POLICY = snapstream(4, 64, 60, WindowScorer())  # longer prompts than 128 tokens go through scratch


def step_time(batch: Batch) -> float:
    """Without attention: the same for every context."""
    if isinstance(batch, DecodeBatch):
        return SECONDS_PER_DECODE * batch.num_steps
    return SECONDS_PER_TOKEN * batch.shape.num_rows * batch.shape.num_tokens


def drive(
    max_inter_token_latency: float,
    num_slots: int = 8,
    max_decode_steps: int = 1,
    step_time: Callable[[Batch], float] = step_time,
) -> Drive:
    spec = fake_spec(policy=POLICY, max_model_len=32_768, prefill_shapes=SHAPES, num_slots=num_slots)
    config = SchedulerConfig(
        max_inter_token_latency=max_inter_token_latency, max_decode_steps=max_decode_steps
    )
    return Drive(spec, config, step_time=step_time)


def longest_gap(engine: Drive, request_id: str) -> float:
    times = engine.token_times[request_id, 0]
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("bound", [0.03, 0.05, 0.2, 0.6])
def test_live_sequences_get_their_tokens_within_the_bound(bound: float, max_decode_steps: int) -> None:
    engine = drive(bound, max_decode_steps=max_decode_steps)
    engine.run(request("warm", 10, max_tokens=3))  # the first launch is not timed yet
    engine.send(request("stream", 10, max_tokens=300))
    for _ in range(3):
        engine.step()
    engine.send(
        request("long", 20_000, max_tokens=3),
        *(request(f"short {i}", 30 + i, max_tokens=20) for i in range(10)),
    )
    engine.run()
    assert longest_gap(engine, "stream") <= bound + 1e-6
    assert max(longest_gap(engine, f"short {i}") for i in range(10)) <= bound + 1e-6


@pytest.mark.parametrize(("bound", "num_decode_steps"), [(0.03, 625), (0.2, 57), (0.6, 18)])
def test_the_bound_is_used_up(bound: float, num_decode_steps: int) -> None:
    """Reading 20,000 tokens takes 10 s.

    Besides its decode step, each gap has room for 1, 11 and 36 chunks of 32 tokens.
    """
    engine = drive(bound)
    engine.send(request("stream", 10, max_tokens=2000))
    engine.step()
    engine.run(request("long", 20_000, max_tokens=1))
    (first_token,) = engine.token_times["long", 0]
    assert sum(time < first_token for time in engine.token_times["stream", 0]) <= num_decode_steps
    assert first_token <= 10.1 + num_decode_steps * SECONDS_PER_DECODE


def attention_time(batch: Batch) -> float:
    """A chunk's attention grows with its context: at 16,384 tokens it takes as long as everything else."""
    if isinstance(batch, DecodeBatch):
        return SECONDS_PER_DECODE * batch.num_steps
    context = max(row.start + len(row.token_ids) for row in batch.rows)
    return step_time(batch) * (1 + context / 16_384)


def test_the_bound_holds_while_the_context_grows() -> None:
    """Nearly while the estimates are made, then exactly."""
    engine = drive(0.3, step_time=attention_time)
    engine.send(request("stream", 10, max_tokens=1000))
    engine.step()
    longest = list[float]()
    for name in ("first", "second", "third"):
        engine.send(request(name, 30_000, max_tokens=1))
        num_before = len(engine.token_times["stream", 0])
        while (name, 0) not in engine.token_times:
            engine.step()
        times = engine.token_times["stream", 0][num_before:]
        assert len(times) > 80
        longest.append(max(later - earlier for earlier, later in pairwise(times)))
    assert max(longest[:2]) <= 0.3 * 1.02
    assert longest[2] <= 0.3 + 1e-6


@pytest.mark.parametrize(("scatter", "max_late"), [(0.03, 0.01), (0.06, 0.01), (0.1, 0.02)])
def test_few_tokens_come_after_the_bound_while_step_times_scatter(scatter: float, max_late: float) -> None:
    """Few more than one in a hundred, since estimates scatter too."""
    noise = random.Random(3)

    def scattering_time(batch: Batch) -> float:
        return attention_time(batch) * max(noise.gauss(1, scatter), 0.1)

    engine = drive(0.3, step_time=scattering_time)
    engine.send(request("stream", 10, max_tokens=5000))
    engine.step()
    engine.run(*(request(f"long {i}", 30_000, max_tokens=1) for i in range(8)))
    last = max(engine.token_times[f"long {i}", 0][0] for i in range(8))
    times = [time for time in engine.token_times["stream", 0] if time <= last]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) > 700
    assert sum(gap > 0.3 for gap in gaps) / len(gaps) <= max_late
    assert last < 1.2 * 8 * 30_000 * SECONDS_PER_TOKEN * (1 + 15_000 / 16_384)


def seconds_of_prompts(step_seconds: Callable[[int], float | None]) -> list[float]:
    """Return how long each of six prompts of 5,000 tokens is read beside a stream.

    `step_seconds` returns the time of the prefill step of a number, or None for the usual one.
    """
    num_steps = 0

    def time(batch: Batch) -> float:
        nonlocal num_steps
        if isinstance(batch, DecodeBatch):
            return attention_time(batch)
        num_steps += 1
        return step_seconds(num_steps) or attention_time(batch)

    engine = drive(0.2, step_time=time)
    engine.send(request("stream", 10, max_tokens=20_000))
    engine.step()
    seconds = []
    for number in range(6):
        start = engine.clock.now()
        engine.send(request(f"long {number}", 5000, max_tokens=1))
        while (f"long {number}", 0) not in engine.token_times:
            engine.step()
        seconds.append(engine.clock.now() - start)
    return seconds


@pytest.mark.parametrize("slow_steps", [range(1, 4), range(60, 61), range(100, 103)])
def test_a_few_very_slow_steps_slow_no_later_prompt(slow_steps: range) -> None:
    usual = seconds_of_prompts(lambda _: None)
    slowed = seconds_of_prompts(lambda number: 10.0 if number in slow_steps else None)
    hit = max(range(6), key=lambda index: slowed[index])
    assert slowed[hit] > 10.0
    assert max(slowed[hit + 1 :]) <= 1.1 * max(usual)


def test_rare_slow_steps_cost_little_more_than_their_time() -> None:
    """One of fifty takes 3 s. Estimates stay positive: a negative one would be the fastest plan of all."""
    slow_steps = list[int]()

    def note(number: int) -> float | None:
        if number % 50 != 7:
            return None
        slow_steps.append(number)
        return 3.0

    usual, slowed = seconds_of_prompts(lambda _: None), seconds_of_prompts(note)
    assert len(slow_steps) >= 5
    assert sum(slowed) - 3.0 * len(slow_steps) <= 1.2 * sum(usual)


def test_estimates_follow_a_device_that_slows_down() -> None:
    """At a third of its speed, chunks of 1,024 tokens exceed the bound once. Then it is kept again."""

    def slowing_time(batch: Batch) -> float:
        return step_time(batch) * (3 if engine.clock.now() > 5.0 else 1)

    engine = drive(0.6, step_time=slowing_time)
    engine.send(request("stream", 10, max_tokens=2000))
    engine.step()
    engine.run(request("long", 30_000, max_tokens=1))
    gaps = [later - earlier for earlier, later in pairwise(engine.token_times["stream", 0])]
    assert 1 <= sum(gap > 0.6 for gap in gaps) <= 5
    assert engine.token_times["long", 0][0] > 25.0


def test_idle_time_is_no_gap() -> None:
    """No sequence waited for a token before the first went live, so the next prompt is read first."""
    engine = drive(0.6)
    engine.run(request("early", 10))
    engine.clock.elapse(100.0)
    engine.batches.clear()
    engine.run(request("short", 10, max_tokens=3), request("long", 200, max_tokens=3))
    assert [batch.kind for batch in engine.batches[:2]] == [StepKind.PREFILL] * 2


def test_a_shape_never_timed_gets_a_trial() -> None:
    """Four rows are expected to take four times as long as one until three rows were measured."""
    engine = drive(1.0)
    engine.run(request("first", 30))
    engine.batches.clear()
    engine.run(*(request(name, 30) for name in "abc"))
    assert (engine.batches[0].kind, engine.batches[0].num_rows) == (StepKind.PREFILL, 3)


def test_a_shape_is_guessed_from_one_of_similar_size() -> None:
    """A step's fixed cost makes small ones slow. Scaled from these, the largest would never fit the gap."""

    def time(batch: Batch) -> float:
        if isinstance(batch, DecodeBatch):
            return SECONDS_PER_DECODE * batch.num_steps
        return 0.04 + 1e-4 * batch.shape.num_rows * batch.shape.num_tokens

    engine = drive(0.3, step_time=time)
    engine.run(request("idle", 300, max_tokens=1))
    engine.send(request("stream", 10, max_tokens=8000))
    engine.step()
    for length in range(276, 8000, 256):  # in chunks of 256 tokens and, at the end, of 32
        engine.run(request(f"of {length}", length, max_tokens=1))
    start = engine.clock.now()
    engine.run(request("long", 8000, max_tokens=1))
    (first_token,) = engine.token_times["long", 0]
    assert first_token - start < 8 * (0.04 + 0.1024 + SECONDS_PER_DECODE)


def test_a_slightly_slower_step_with_more_tokens_is_chosen() -> None:
    """Step times vary by as much. A shape that was slow by chance must not be avoided for many steps."""
    shapes = list[PrefillShape]()

    def scattering_time(batch: Batch) -> float:
        if not isinstance(batch, PrefillBatch):
            return step_time(batch)
        shapes.append(batch.shape)
        return step_time(batch) * (1.08 if batch.shape.num_tokens > 32 else 1)

    engine = drive(1.0, step_time=scattering_time)
    engine.run(*(request(name, 256) for name in "abc"))
    shapes.clear()
    engine.run(request("again", 256))
    assert shapes == [PrefillShape(1, 256)]


def test_prefill_continues_by_single_steps_if_no_step_fits_the_bound() -> None:
    engine = drive(0.0, max_decode_steps=4)
    engine.send(request("stream", 10, max_tokens=10_000))
    engine.step()
    engine.send(request("long", 640, max_tokens=1))
    while ("long", 0) not in engine.token_times:
        engine.step()
    kinds = [batch.kind for batch in engine.batches[1:]]
    assert kinds == [StepKind.DECODE, StepKind.PREFILL] * 20
    assert {batch.num_tokens for batch in engine.batches[1:] if batch.kind is StepKind.PREFILL} == {32}
    assert {batch.num_steps for batch in engine.batches} == {1}


def test_the_end_of_a_round_is_read_in_a_shape_of_its_size() -> None:
    """Rounds of 288 tokens are chunks of 256 and of 32, in no larger shape."""
    layout, chunks = ScratchLayout(512, 288, num_ahead=32), list[tuple[int, int]]()

    def time_and_note(batch: Batch) -> float:
        if isinstance(batch, PrefillBatch):
            chunks.append((len(batch.rows[0].token_ids), batch.shape.num_tokens))
        return step_time(batch)

    engine = Drive(
        fake_spec(policy=POLICY, max_model_len=32_768, prefill_shapes=SHAPES, scratch=layout),
        step_time=time_and_note,
    )
    engine.run(request("first", 10_000, max_tokens=1))
    chunks.clear()
    engine.run(request("again", 512 + 4 * 288, max_tokens=1))
    assert chunks[-8:] == [(256, 256), (32, 32)] * 4


def test_a_short_prompt_is_read_beside_a_long_one() -> None:
    engine = drive(0.2)
    engine.send(request("long", 30_000, max_tokens=1))
    engine.step()
    arrived = engine.clock.now()
    engine.run(request("short", 30, max_tokens=1))
    (first_token,), (long_first_token,) = engine.token_times["short", 0], engine.token_times["long", 0]
    longest_chunk = SECONDS_PER_TOKEN * 1024
    assert first_token - arrived <= longest_chunk + SECONDS_PER_TOKEN * 32 + 1e-9
    assert long_first_token > 10.0


def test_an_endless_stream_of_short_prompts_starves_no_long_one() -> None:
    """The second long prompt waits for the only scratch. From then on, no later one is admitted before it."""
    spec = fake_spec(policy=POLICY, max_model_len=32_768, prefill_shapes=SHAPES, num_slots=2, num_scratch=1)
    engine = Drive(spec, SchedulerConfig(max_num_waiting=10_000), step_time=step_time)
    engine.send(request("long", 20_000, max_tokens=40), request("long too", 20_000, max_tokens=2))
    num_sent = 0
    while ("long too", 0) not in engine.token_times:
        assert num_sent < 2_000
        for _ in range(2):
            engine.send(request(f"short {num_sent}", 20, max_tokens=5, arrival_time=engine.clock.now()))
            num_sent += 1
        engine.step()
    engine.run()
    scratch_free = engine.final("long").timing.first_token
    admitted = engine.final("long too").timing.admitted
    assert scratch_free is not None
    assert admitted is not None
    times = [engine.final(f"short {i}").timing.admitted or 0.0 for i in range(num_sent)]
    assert sum(time < scratch_free for time in times) > 5  # they passed while there was no scratch
    assert not [time for time in times if scratch_free <= time < admitted]


def test_launches_have_several_steps_only_when_nothing_waits() -> None:
    engine = drive(1.0, num_slots=2, max_decode_steps=4)
    engine.send(request("a", 10, max_tokens=12), request("b", 10, max_tokens=7))
    engine.run()
    assert [batch.num_steps for batch in engine.batches if batch.kind is StepKind.DECODE] == [4, 2, 4, 1]
    engine.batches.clear()
    engine.run(*(request(name, 10, max_tokens=9) for name in "abc"))
    assert [batch.num_steps for batch in engine.batches if batch.kind is StepKind.DECODE] == [1] * 8 + [4, 4]


@pytest.mark.parametrize(("bound", "num_steps"), [(0.14, 1), (0.151, 2), (0.2, 4), (float("inf"), 4)])
def test_decode_uses_the_time_that_a_chunk_leaves(bound: float, num_steps: int) -> None:
    """Between ten chunks of 128 ms; a decode step takes 10. Without a bound the prompt is read to its end."""
    spec = fake_spec(policy=POLICY, max_model_len=32_768, prefill_shapes=[PrefillShape(1, 256)], num_slots=2)
    engine = Drive(spec, SchedulerConfig(max_inter_token_latency=bound), step_time=step_time)
    engine.run(request("warm", 10, max_tokens=8))
    engine.batches.clear()
    engine.run(request("stream", 10, max_tokens=200), request("long", 2560, max_tokens=1))
    while engine.batches[-1].kind is StepKind.DECODE:
        engine.batches.pop()
    launches = [batch.num_steps for batch in engine.batches if batch.kind is StepKind.DECODE]
    assert launches == ([] if bound == float("inf") else [num_steps] * 9)


def test_each_pool_decodes_within_the_bound() -> None:
    """What a chunk leaves is shared: neither pool's steps take up what belongs to the other's."""
    pools = (slot_pool(2, POLICY, 32_768, "one"), slot_pool(2, POLICY, 32_768, "other"))
    spec = fake_spec(pools=pools, max_model_len=32_768, prefill_shapes=[PrefillShape(1, 256)])
    engine = Drive(spec, SchedulerConfig(max_inter_token_latency=0.17), step_time=step_time)
    engine.run(request("warm", 10, max_tokens=8), replace(request("warm too", 10, max_tokens=8), pool=1))
    engine.send(request("a", 10, max_tokens=200), replace(request("b", 10, max_tokens=200), pool=1))
    for _ in range(4):
        engine.step()
    engine.batches.clear()
    engine.run(request("long", 2560, max_tokens=1))
    reading = [number for number, batch in enumerate(engine.batches) if batch.kind is StepKind.PREFILL]
    launches = [
        batch.num_steps for batch in engine.batches[reading[0] : reading[-1]] if batch.kind is StepKind.DECODE
    ]
    assert set(launches) == {2}
    assert max(longest_gap(engine, name) for name in "ab") <= 0.17 + 1e-6


@pytest.mark.parametrize(("bound", "launches"), [(0.025, [4, 2, 2, 2, 1]), (0.005, [4, 1, 1, 1, 1, 1, 1, 1])])
def test_a_launch_is_not_longer_than_the_bound(bound: float, launches: list[int]) -> None:
    """But for the first, which was not timed yet."""
    engine = drive(bound, max_decode_steps=4)
    engine.run(request("a", 10, max_tokens=12))
    assert [batch.num_steps for batch in engine.batches if batch.kind is StepKind.DECODE] == launches


def test_a_launch_ends_where_the_banned_tokens_change() -> None:
    engine = Drive(config=SchedulerConfig(max_decode_steps=4))
    engine.run(request("a", 10, max_tokens=10, min_tokens=6, stop_token_ids=frozenset({0})))
    assert [batch.num_steps for batch in engine.batches if batch.kind is StepKind.DECODE] == [4, 1, 4]


def decode_batch(*names: str, pool: int = 0) -> DecodeBatch:
    rows = (DecodeRow(name, slot, 1, 1, 1, Draw(GREEDY)) for slot, name in enumerate(names))
    return DecodeBatch(tuple(rows), 1, pool)


def test_rounding_costs_no_decode_step() -> None:
    """As floating-point numbers, 0.3 / 0.1 is less than 3."""
    pacing = Pacing([SHAPES], 0.3)
    pacing.observe(decode_batch("a"), elapsed=0.1, now=0.0)
    assert pacing.max_decode_steps([0], now=0.0) == 3


@pytest.mark.parametrize("other_pools", [[], [1]])
def test_the_wait_of_rows_that_skipped_a_step_counts(other_pools: list[int]) -> None:
    """Row b has waited since 0.02 s. Of 0.1 s, there is no time left for a chunk of 32 tokens and a step."""
    pacing, prompt = Pacing([SHAPES], 0.1), Prefill([Request(request("p", 300), 0, False, 0)], None, LAYOUT)
    pacing.observe(decode_batch("a", "b"), elapsed=0.02, now=0.02)
    pacing.observe(decode_batch("a"), elapsed=0.01, now=0.03, is_partial=True)
    for pool in other_pools:
        pacing.observe(decode_batch("c", pool=pool), elapsed=0.01, now=0.04)
    decoding = [0, *other_pools]
    assert pacing.max_decode_steps(decoding, now=0.05) == (2 if other_pools else 3)
    assert pacing.choose_shape([prompt], 0.075, decoding) is None
    pacing.observe(decode_batch("a", "b"), elapsed=0.02, now=0.095)
    assert pacing.choose_shape([prompt], 0.3, decoding) is not None  # one step, however late


def test_trials_of_partial_steps_become_rare_while_they_fail() -> None:
    pacing, now = Pacing([SHAPES], 0.2), 0.0

    def step(partial_seconds: float) -> bool:
        nonlocal now
        is_partial = pacing.may_skip(0, [0], now, prompt_waits=False)
        seconds = partial_seconds if is_partial else 0.01
        now += seconds
        pacing.observe(decode_batch("a"), seconds, now, is_partial=is_partial)
        return is_partial

    assert sum(step(0.01) for _ in range(3000)) == 6  # at first, and after 64, 128, 256, 512 and 1024 others
    assert sum(step(0.004) for _ in range(1500)) > 300  # from the next trial on, which shows that they help

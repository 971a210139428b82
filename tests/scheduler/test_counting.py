"""The scheduler that only counts decode steps takes the same ones, for the same rows."""

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.clock import VirtualClock
from backends.fake import fake_spec
from backends.interface import Batch, BatchResult, PrefillBatch, SampledToken, SamplingParams
from cache.policy_options import PolicyOptions
from scheduler.admission import admit
from scheduler.config import SchedulerConfig
from scheduler.counting import CountingScheduler
from scheduler.messages import Add, Final, StopCriteria
from scheduler.scheduler import Scheduler

SPEC = fake_spec(num_slots=3, max_model_len=2048, policy=PolicyOptions(slot_capacity=256).resolve(2048))
CONFIG = SchedulerConfig(max_decode_steps=1, max_inter_token_latency=0.05)


def steps(
    scheduler: Scheduler, clock: VirtualClock, lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[object, list[tuple[str, Final]]]]:
    """Yield what each batch does, and which requests end with it. One comes before every second step."""
    waiting = list(enumerate(lengths))
    number = 0
    while waiting or scheduler.has_work:
        if waiting and number % 2 == 0:
            index, (num_prompt_tokens, num_output_tokens) = waiting.pop(0)
            stop = StopCriteria(max_tokens=num_output_tokens)
            prompt = (1,) * num_prompt_tokens
            add = Add(str(index), prompt, SamplingParams(temperature=0.0), stop, clock.now())
            scheduler.add(admit(add, SPEC))
        number += 1
        batch = scheduler.schedule()
        if batch is None:
            continue
        clock.elapse(1 / 64)
        counts = isinstance(scheduler, CountingScheduler)
        scheduler.update(batch, BatchResult(tokens_of(batch, counts=counts), 1 / 64))
        finals = [(out.request_id, out.final) for out in scheduler.take_outputs() if out.final is not None]
        yield described(batch), finals
        scheduler.check_integrity()


def tokens_of(batch: Batch, *, counts: bool) -> tuple[tuple[SampledToken, ...], ...]:
    token = SampledToken(0)
    if isinstance(batch, PrefillBatch):
        return tuple((token,) * len(row.draws) for row in batch.rows)
    return () if counts else ((token,),) * len(batch.rows)


def described(batch: Batch) -> object:
    """Return all of a batch but the tokens and the draws of its decode rows."""
    if isinstance(batch, PrefillBatch):
        return batch
    return [(row.request_id, row.slot, row.index, row.num_prompt_tokens) for row in batch.rows]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 40)), min_size=1, max_size=12))
def test_every_step_and_every_end_is_that_of_the_scheduler(lengths: Sequence[tuple[int, int]]) -> None:
    clock, other = VirtualClock(), VirtualClock()
    plain = list(steps(Scheduler(SPEC, CONFIG, clock), clock, lengths))
    counted = list(steps(CountingScheduler(SPEC, CONFIG, other), other, lengths))
    assert counted == plain

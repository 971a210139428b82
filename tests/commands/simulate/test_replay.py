"""Replays through the real scheduler: collapsed steps equal single steps, and no request is lost."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import Batch, DecodeBatch
from backends.sn40l.backend import default_deployment
from backends.sn40l.cost_model import DeploymentCost
from cache.policy import full
from cache.policy_options import PolicyOptions
from commands.simulate.arrivals import Arrival, ShapeName, Traffic
from commands.simulate.replay import Replay, ReplayRecord, replay_spec
from scheduler.config import SchedulerConfig


class DyadicCost:
    """Costs that are exact binary fractions of a second, so that sums do not depend on their order."""

    def seconds(self, batch: Batch) -> float:
        return batch.num_steps / 64 if isinstance(batch, DecodeBatch) else batch.shape.num_tokens / 4096


def play(
    arrivals: Sequence[Arrival], num_slots: int, *, collapses: bool, config: SchedulerConfig | None = None
) -> ReplayRecord:
    spec = replay_spec(num_slots, PolicyOptions(slot_capacity=512).resolve(8192), 8192)
    return Replay(spec, DyadicCost(), config, collapses=collapses, sample_interval=math.inf).run(arrivals)


def arrivals_of(gaps: Sequence[tuple[float, int, int]]) -> list[Arrival]:
    time, arrivals = 0.0, []
    for gap, num_prompt_tokens, num_output_tokens in gaps:
        time += gap
        arrivals.append(Arrival(time, num_prompt_tokens, num_output_tokens))
    return arrivals


GAPS = st.lists(
    st.tuples(st.integers(0, 300).map(lambda count: count / 64), st.integers(1, 3000), st.integers(1, 300)),
    min_size=1,
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(GAPS, st.integers(1, 6), st.sampled_from((0.0, 0.05, 1.0, math.inf)))
def test_collapsed_steps_equal_single_steps(
    gaps: Sequence[tuple[float, int, int]], num_slots: int, latency: float
) -> None:
    config = SchedulerConfig(max_num_waiting=1000, max_inter_token_latency=latency)
    stepped = play(arrivals_of(gaps), num_slots, collapses=False, config=config)
    collapsed = play(arrivals_of(gaps), num_slots, collapses=True, config=config)
    assert collapsed.num_launches <= stepped.num_launches == stepped.num_steps == collapsed.num_steps
    assert collapsed.end_times == stepped.end_times
    assert collapsed.queue_time == stepped.queue_time
    assert collapsed.time_to_first_token == stepped.time_to_first_token
    assert collapsed.time_per_output_token == stepped.time_per_output_token
    assert collapsed.slot_seconds == pytest.approx(stepped.slot_seconds)


def test_collapsing_needs_far_fewer_launches() -> None:
    arrivals = [Arrival(0.0, 10, 1000), Arrival(100.0, 10, 500)]
    assert play(arrivals, 4, collapses=True).num_launches < 10
    assert play(arrivals, 4, collapses=False).num_launches > 1000


def test_every_request_ends_once_and_no_token_is_lost() -> None:
    traffic = Traffic(
        rate=20,
        num_requests=300,
        mean_prompt_tokens=300,
        mean_output_tokens=50,
        shape=ShapeName.BURSTS,
        seed=3,
    )
    record = play(list(traffic.arrivals()), 8, collapses=True)
    assert len(record.end_times) == 300
    assert record.num_refused == 0
    assert record.num_output_tokens == sum(arrival.num_output_tokens for arrival in traffic.arrivals())
    assert record.num_prompt_tokens == sum(arrival.num_prompt_tokens for arrival in traffic.arrivals())


def test_the_same_trace_gives_the_same_result() -> None:
    arrivals = list(Traffic(rate=20, num_requests=200, seed=1).arrivals())
    assert play(arrivals, 8, collapses=True) == play(arrivals, 8, collapses=True)


def test_refused_requests_are_counted() -> None:
    record = play([Arrival(0.0, 9000, 5), Arrival(0.0, 5, 5)], 2, collapses=True)
    assert (record.num_refused, len(record.end_times)) == (1, 1)


def test_one_request_takes_the_published_time_per_token() -> None:
    spec = replay_spec(4, full(8192), 8192)
    cost = DeploymentCost(default_deployment("llama-3.1-8b", "sn40l", 16), spec.pools[0])
    record = Replay(spec, cost).run([Arrival(1.0, 200, 101)])
    (ttft,), (tpot,) = record.time_to_first_token, record.time_per_output_token
    assert record.seconds == pytest.approx(1.0 + ttft + 100 * tpot)
    # A step of four slots takes little longer than one of one slot, whose published rate is 1042 tokens/s.
    assert 1 / tpot == pytest.approx(1000, rel=0.2)

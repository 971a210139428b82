"""Replays through the real scheduler: collapsed steps equal single steps, and no request is lost."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.config import prefill_shapes
from backends.interface import Batch, DecodeBatch, PrefillBatch, PrefillRow, PrefixSpec
from backends.sn40l.backend import default_deployment
from backends.sn40l.step.cost_model import DeploymentCost, compression_of
from backends.timed import SimulatedStore
from cache.policy import full
from cache.policy_options import PolicyOptions
from commands.simulate.arrivals import HASH_TOKENS, Arrival, ShapeName, Traffic
from commands.simulate.drafting import Drafting
from commands.simulate.replay import Replay, ReplayRecord, replay_spec
from scheduler.config import SchedulerConfig


class DyadicCost:
    """Costs that are exact binary fractions of a second, so that sums do not depend on their order."""

    def seconds(self, batch: Batch) -> float:
        return batch.num_steps / 64 if isinstance(batch, DecodeBatch) else batch.shape.num_tokens / 4096


def play(
    arrivals: Sequence[Arrival],
    num_slots: int,
    *,
    collapses: bool,
    config: SchedulerConfig | None = None,
    store: SimulatedStore | None = None,
    drafting: Drafting | None = None,
) -> ReplayRecord:
    policy = PolicyOptions(slot_capacity=512).resolve(8192)
    spec = replay_spec(num_slots, policy, 8192, store.spec if store is not None else None)
    replay = Replay(
        drafting.spec(spec) if drafting is not None else spec,
        DyadicCost(),
        config,
        collapses=collapses,
        sample_interval=math.inf,
        store=store,
        drafting=drafting,
    )
    return replay.run(arrivals)


def arrivals_of(gaps: Sequence[tuple[float, int, int, int]]) -> list[Arrival]:
    time, arrivals = 0.0, []
    for gap, num_prompt_tokens, num_output_tokens, document in gaps:
        time += gap
        # Prompts of the same document are beginnings of one another.
        hash_ids = tuple(range(100 * document, 100 * document + num_prompt_tokens // HASH_TOKENS))
        arrivals.append(Arrival(time, num_prompt_tokens, num_output_tokens, hash_ids=hash_ids))
    return arrivals


# A store of seven blocks, each copied in a 1024th of a second.
STORE = SimulatedStore(PrefixSpec(7, HASH_TOKENS, 1 << 10), 1 << 20)
DRAFTING = Drafting(default_deployment("llama-3.2-1b", "sn40l", 16), threshold=1500, keep=0.25)
GAPS = st.lists(
    st.tuples(
        st.integers(0, 300).map(lambda count: count / 64),
        st.integers(1, 3000),
        st.integers(1, 300),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(
    GAPS,
    st.integers(1, 6),
    st.sampled_from((0.0, 0.05, 1.0, math.inf)),
    st.sampled_from((None, STORE)),
    st.sampled_from((None, DRAFTING)),
)
def test_collapsed_steps_equal_single_steps(
    gaps: Sequence[tuple[float, int, int, int]],
    num_slots: int,
    latency: float,
    store: SimulatedStore | None,
    drafting: Drafting | None,
) -> None:
    """The one with `CountingScheduler`, the other with `Scheduler` token by token."""
    config = SchedulerConfig(max_num_waiting=1000, max_inter_token_latency=latency)
    stepped, collapsed = (
        play(
            arrivals_of(gaps),
            num_slots,
            collapses=collapses,
            config=config,
            store=store,
            drafting=drafting,
        )
        for collapses in (False, True)
    )
    assert collapsed.num_restored_tokens == stepped.num_restored_tokens
    assert collapsed.num_output_tokens == stepped.num_output_tokens
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


def test_prompts_that_begin_alike_are_read_once() -> None:
    document = (7, 3, 9, 1)
    first, other = Arrival(0.0, 2100, 5, hash_ids=document), Arrival(50.0, 2100, 5, hash_ids=(8, 3, 9, 1))
    again = Arrival(100.0, 2100, 5, hash_ids=(*document[:3], 2))
    record = play([first, other, again], 2, collapses=True, store=STORE)
    assert record.num_restored_tokens == 3 * HASH_TOKENS
    alone, different, shared = record.time_to_first_token
    assert different == alone
    assert shared < alone
    # Without hash ids, nothing says what prompts share.
    bare = [Arrival(arrival.time, 2100, 5) for arrival in (first, other, again)]
    assert play(bare, 2, collapses=True, store=STORE).num_restored_tokens == 0


def test_a_draft_shortens_long_prompts() -> None:
    """Draft and model take turns on the machine, in the real scheduler."""
    assert [DRAFTING.num_read(size) for size in (1499, 1500, 3200)] == [1499, 384, 800]
    assert replace(DRAFTING, keep=500.0).num_read(3200) == 500
    model = default_deployment("llama-3.1-70b", "sn40l", 16)
    spec = replay_spec(4, full(65536), 65536)
    cost = DeploymentCost(model, spec.pools[0])
    with_draft = DRAFTING.spec(spec)
    arrivals = [Arrival(0.0, 60000, 5)]
    (plain,) = Replay(spec, cost).run(arrivals).time_to_first_token
    drafted = Replay(with_draft, DRAFTING.cost(cost, with_draft), drafting=DRAFTING).run(arrivals)
    (shortened,) = drafted.time_to_first_token
    assert drafted.num_prompt_tokens == DRAFTING.num_read(60000)
    assert drafted.num_prompt_tokens + drafted.num_removed_tokens == 60000
    (alone,) = Replay(spec, cost).run([Arrival(0.0, DRAFTING.num_read(60000), 5)]).time_to_first_token
    assert alone + 0.8 * DRAFTING.seconds(60000) < shortened < plain / 2


def test_prompts_that_need_kept_entries_are_read_in_a_scratch() -> None:
    """As the real backends do: those that a slot holds whole, too, but they are not compressed."""
    spec = replay_spec(2, PolicyOptions(slot_capacity=512).resolve(8192), 8192)
    (pool,) = spec.pools
    sizes = (pool.max_direct_tokens, pool.max_direct_tokens + 1, pool.policy.max_exact_prompt + 1)
    rows: list[PrefillRow] = []

    class Watching(DyadicCost):
        def seconds(self, batch: Batch) -> float:
            rows.extend(batch.rows if isinstance(batch, PrefillBatch) else ())
            return super().seconds(batch)

    Replay(spec, Watching()).run([Arrival(float(i), size, 1) for i, size in enumerate(sizes)])
    last = [row for row in rows if row.is_last]
    assert [row.scratch is not None for row in last] == [False, True, True]
    assert [compression_of(pool.policy, row.num_prompt_tokens) is not None for row in last] == [
        False,
        False,
        True,
    ]


def test_chunks_are_those_of_the_server() -> None:
    sizes = [shape.num_tokens for shape in replay_spec(2, full(8192), 8192, prefill_chunk=512).prefill_shapes]
    assert sizes == [32, 64, 128, 256, 512]
    assert set(replay_spec(2, full(8192), 8192).prefill_shapes) < set(prefill_shapes(4096, 8192))


def test_one_request_takes_the_published_time_per_token() -> None:
    spec = replay_spec(4, full(8192), 8192)
    cost = DeploymentCost(default_deployment("llama-3.1-8b", "sn40l", 16), spec.pools[0])
    record = Replay(spec, cost).run([Arrival(1.0, 200, 101)])
    (ttft,), (tpot,) = record.time_to_first_token, record.time_per_output_token
    assert record.seconds == pytest.approx(1.0 + ttft + 100 * tpot)
    # A step of four slots takes little longer than one of one slot, whose published rate is 1042 tokens/s.
    assert 1 / tpot == pytest.approx(1000, rel=0.2)

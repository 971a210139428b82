"""A draft beside the model that answers: steps in turns, scratches of its own, and a place in the queue."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from backends.clock import VirtualClock
from backends.composite import CompositeBackend
from backends.config import DRAFT_SCORER
from backends.fake import FakeBackend, fake_spec, slot_pool
from backends.fake_model import importance
from backends.interface import BackendError, BackendSpec, Batch, Importance, PrefixSpec
from cache.policy import snapstream
from scheduler.admission import RefusalReason, RefusedError, admit
from scheduler.config import SchedulerConfig
from scheduler.messages import Abort, AdmittedAdd, FinishReason
from scheduler.waiting import QueueOrder
from tests.scheduler.drive import Drive, answer, request

WANTED = Importance(16)
DRAFT_POOL = 1


def draft_spec(**changes: object) -> BackendSpec:
    policy = snapstream(0, DRAFT_SCORER.observation_window, 1, DRAFT_SCORER)
    options = {"vocab_size": 600, "num_scratch": 1, "pools": (slot_pool(0, policy, 4096, "draft"),)}
    return fake_spec(**(options | changes))  # type: ignore[arg-type]


class Pair(Drive):
    """A model with two slots and its draft, and the pool of each step."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        draft: BackendSpec | None = None,
        seconds: float = 0.0,
        faults: dict[int, BackendError] | None = None,
    ) -> None:
        clock = VirtualClock()
        self.pools: list[int] = []

        def of_pool(pool: int) -> Callable[[Batch], float]:
            def step_time(_: Batch) -> float:
                self.pools.append(pool)
                return seconds

            return step_time

        backend = CompositeBackend(
            FakeBackend(fake_spec(num_slots=2), clock=clock, step_time=of_pool(0)),
            FakeBackend(draft or draft_spec(), clock=clock, step_time=of_pool(DRAFT_POOL), faults=faults),
        )
        super().__init__(config=config, backend=backend, clock=clock)


def scored(request_id: str, num_tokens: int = 100, **changes: object) -> AdmittedAdd:
    add = request(request_id, num_tokens, 0)
    return AdmittedAdd(replace(add, importance=WANTED, pool=DRAFT_POOL, **changes))  # type: ignore[arg-type]


def test_a_draft_returns_the_importance_of_each_chunk() -> None:
    drive = Pair()
    add = scored("a", question_token_ids=(7, 8), question_weight=0.5)
    drive.run(add)
    final = drive.final("a")
    assert (final.reason, final.num_prompt_tokens) == (FinishReason.LENGTH, 100)
    expected = importance(add.prompt_token_ids, (7, 8), 0.5, WANTED.chunk_tokens)
    assert drive.outputs["a", 0][-1].importance == expected
    assert len(expected) == 7
    assert set(drive.pools) == {DRAFT_POOL}


def test_answers_do_not_depend_on_a_draft_beside_them() -> None:
    alone, both = Drive(fake_spec(num_slots=2)), Pair()
    adds = [request(name, 300, 6) for name in "abc"]
    alone.run(*adds)
    both.run(scored("x", 400), adds[0], scored("y", 30), *adds[1:])
    for add in adds:
        expected = answer(add, both.spec)
        assert both.tokens(add.request_id) == alone.tokens(add.request_id) == expected
    assert {both.final(name).reason for name in "xy"} == {FinishReason.LENGTH}


def test_decode_goes_on_while_a_draft_reads() -> None:
    drive = Pair(SchedulerConfig(max_inter_token_latency=0.05), seconds=0.02)
    drive.run(request("a", 10, 30), scored("x", 3000))
    first, *_ = times = drive.token_times["a", 0]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert first < 0.1
    assert max(gaps) <= 0.06 + 1e-9
    assert drive.pools.count(DRAFT_POOL) > 10


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_draft_frees_its_scratch(num_steps: int) -> None:
    drive = Pair()
    drive.send(scored("x", 2000))
    for _ in range(num_steps):
        drive.step()
    drive.run(Abort("x"), scored("y"))
    assert drive.final("x").reason is FinishReason.ABORT
    assert drive.final("y").reason is FinishReason.LENGTH


def test_a_draft_s_failed_step_ends_its_requests_alone() -> None:
    drive = Pair(faults=dict.fromkeys((1, 2), BackendError("a draft broke")))
    add = request("a", 20, 8)
    drive.run(scored("x", 600), add)
    assert drive.final("x").reason is FinishReason.ERROR
    assert drive.tokens("a") == answer(add, drive.spec)


def test_what_follows_a_draft_keeps_its_place() -> None:
    drive = Pair(SchedulerConfig(order=QueueOrder.FCFS))
    drive.run(scored("x"))
    turn = drive.final("x").turn
    assert turn is not None
    holders = [request(name, 10, 20) for name in "ab"]
    drive.send(*holders)
    drive.step()
    drive.run(request("late", 10, 5), AdmittedAdd(replace(request("x2", 10, 5, num_choices=2), turn=turn)))
    admitted = [drive.final(*key).timing.admitted for key in (("x2", 0), ("x2", 1), ("late", 0))]
    order = [key for key in drive.token_times if key[0] in ("x2", "late")]
    assert order == [("x2", 0), ("x2", 1), ("late", 0)], admitted


@pytest.mark.parametrize("num_draft_tokens", [0, 1000])
def test_a_draft_is_charged_to_its_tenant(num_draft_tokens: int) -> None:
    drive = Pair()
    drive.send(*(request(name, 10, 40, tenant="holder") for name in "ab"))
    drive.step()
    # Both wait for the slots that the holder has, and the first one has come first.
    drive.send(request("first", 10, 5, tenant="reader"), request("second", 10, 5, tenant="other"))
    if num_draft_tokens:
        drive.send(scored("x", num_draft_tokens, tenant="reader"))
    drive.run()
    order = [key[0] for key in drive.token_times if key[0] in ("first", "second")]
    assert order == (["second", "first"] if num_draft_tokens else ["first", "second"])


def test_a_draft_restores_what_it_has_read() -> None:
    drive = Pair(draft=draft_spec(prefixes=PrefixSpec(64, 16, 1)))
    first, second = scored("x", 300), scored("y", 300)
    again = AdmittedAdd(replace(second, prompt_token_ids=first.prompt_token_ids))
    drive.run(first)
    drive.run(again)
    assert drive.outputs["x", 0][-1].importance == drive.outputs["y", 0][-1].importance
    # The observing tokens vote again, so they are read again.
    num_free = 300 - DRAFT_SCORER.observation_window
    assert drive.final("y").num_cached_tokens == num_free - num_free % 16


def test_a_draft_s_own_limits_hold() -> None:
    spec = replace(fake_spec(), drafts=(draft_spec(max_model_len=64),))
    with pytest.raises(RefusedError) as error:
        admit(scored("x", 100), spec)
    assert error.value.refusal.reason is RefusalReason.CONTEXT_LENGTH
    admit(AdmittedAdd(replace(scored("x", 3), prompt_token_ids=(599,))), spec)  # not in the other vocabulary


def test_a_draft_waits_as_others_do() -> None:
    drive = Pair(SchedulerConfig(max_num_waiting=1))
    drive.run(*(scored(name, 400) for name in "xyz"))
    reasons = [drive.final(name).reason for name in "xyz"]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.QUEUE_FULL]
    assert drive.final("z").turn is None
    drive = Pair(SchedulerConfig(max_num_waiting=0))
    drive.run(scored("x"))
    assert drive.final("x").reason is FinishReason.LENGTH

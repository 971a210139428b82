"""One sequence's counters: where it ends, what is discarded, what its slot held."""

import pytest

from backends.interface import SampledToken
from cache.policy import CachePolicy, full, snapstream
from cache.scorer import WindowScorer
from scheduler.messages import FinishReason
from scheduler.request import Request, RequestStatus
from tests.scheduler.drive import request


def sampled(*token_ids: int) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token_id) for token_id in token_ids)


def test_continues_before_its_end() -> None:
    sequence = Request(request("a", max_tokens=5), 0, False, 0)
    assert sequence.append(sampled(1, 2)) == sampled(1, 2)
    assert (sequence.finish_reason, sequence.num_output_tokens, sequence.last_token_id) == (None, 2, 2)


def test_length_discards_later_tokens() -> None:
    sequence = Request(request("a", max_tokens=3), 0, False, 0)
    assert sequence.append(sampled(1, 2, 3, 4)) == sampled(1, 2, 3)
    assert (sequence.finish_reason, sequence.num_output_tokens, sequence.num_discarded_tokens) == (
        FinishReason.LENGTH,
        3,
        1,
    )


def test_stop_token_is_counted_but_not_part_of_the_answer() -> None:
    sequence = Request(request("a", max_tokens=9, stop_token_ids=frozenset({7})), 0, False, 0)
    assert sequence.append(sampled(1, 7, 3, 4)) == sampled(1)
    assert (sequence.finish_reason, sequence.stop_token_id) == (FinishReason.STOP, 7)
    assert (sequence.num_output_tokens, sequence.num_discarded_tokens) == (2, 2)


def test_stop_token_as_the_last_allowed_one_is_a_stop() -> None:
    sequence = Request(request("a", max_tokens=1, stop_token_ids=frozenset({7})), 0, False, 0)
    assert sequence.append(sampled(7)) == ()
    assert sequence.finish_reason is FinishReason.STOP


def test_stop_tokens_are_banned_until_min_tokens_and_a_launch_ends_there() -> None:
    sequence = Request(
        request("a", max_tokens=9, min_tokens=3, stop_token_ids=frozenset({7, 5})), 0, False, 0
    )
    assert (sequence.draw().banned_token_ids, sequence.max_decode_steps) == ((5, 7), 3)
    sequence.append(sampled(1, 2, 3))
    assert (sequence.draw().banned_token_ids, sequence.max_decode_steps) == ((), 6)
    assert sequence.draw().output_index == 3


@pytest.mark.parametrize(
    ("cut_at", "num_kept", "num_discarded"), [(0, 0, 4), (3, 3, 1), (4, 4, 0), (9, 4, 0)]
)
def test_a_cut_counts_the_discarded_tokens(cut_at: int, num_kept: int, num_discarded: int) -> None:
    sequence = Request(request("a", max_tokens=9), 0, False, 0)
    sequence.append(sampled(1, 2, 3, 4))
    sequence.cut(cut_at)
    assert (sequence.num_output_tokens, sequence.num_discarded_tokens) == (num_kept, num_discarded)


# By hand: sinks 2, ring 8, kept 4. A prompt of 20 keeps 2 + 8 + 4 = 14 entries; one of 5 takes 5, and its
# ring wraps at the ninth entry.
SMALL = snapstream(2, 8, 4, WindowScorer(observation_window=4))


@pytest.mark.parametrize(
    ("policy", "num_prompt", "num_written", "num_live", "num_wraps"),
    [
        (full(64), 20, 30, 30, 0),
        (SMALL, 20, 20, 14, 0),
        (SMALL, 20, 21, 14, 1),
        (SMALL, 5, 10, 10, 0),
        (SMALL, 5, 11, 10, 1),
        (SMALL, 5, 19, 10, 2),
    ],
)
def test_cache_use_is_the_layouts_arithmetic(
    policy: CachePolicy, num_prompt: int, num_written: int, num_live: int, num_wraps: int
) -> None:
    sequence = Request(
        request("a", num_prompt), 0, False, 0, RequestStatus.DECODE, slot=3, num_computed_tokens=num_written
    )
    use = sequence.final(FinishReason.STOP, 1.0, policy).cache
    assert use is not None
    assert (use.num_prompt_tokens, use.num_tokens) == (num_prompt, num_written)
    assert (use.num_live, use.num_evicted, use.num_ring_wraps) == (
        num_live,
        num_written - num_live,
        num_wraps,
    )


def test_no_cache_use_before_the_prompt_is_read() -> None:
    sequence = Request(request("a", 20), 0, False, 0, RequestStatus.PREFILL, slot=3, num_computed_tokens=19)
    assert sequence.final(FinishReason.ABORT, 1.0, SMALL).cache is None

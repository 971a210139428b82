"""What the policies are made of, what they refuse, and how long an answer they admit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.layout import SlotLayout
from cache.policy import CachePolicy, PolicyName, full, snapkv, snapstream, sparse, streaming_llm
from cache.scorer import WindowScorer
from tests.cache.simulation import SimulatedSlot

SCORER = WindowScorer(observation_window=2)
POLICIES = {
    "full": full(12),
    "streaming-llm": streaming_llm(2, 5),
    "snapkv": snapkv(max_new_tokens=4, num_kept=3, scorer=SCORER),
    "snapstream": snapstream(2, 5, 3, SCORER),
    "sparse": sparse(num_sink=2, num_recent=5, num_stored=6, num_attended=3),
    "snapstream, kept lent": snapstream(2, 5, 3, SCORER, lend_kept=True),
}


def simulate(policy: CachePolicy, num_prompt_tokens: int) -> SimulatedSlot:
    return SimulatedSlot(policy.layout, policy.prompt_window, num_prompt_tokens, policy.lend_kept)


@pytest.mark.parametrize("prompt_window", [0, 5])
def test_a_prompt_window_outside_the_ring_is_refused(prompt_window: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to num_recent = 4, got {prompt_window}"):
        CachePolicy(PolicyName.STREAMING_LLM, SlotLayout(1, 4, 0), prompt_window, None, evicts=True)


def test_kept_entries_without_a_scorer_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kept = 2 needs a scorer"):
        CachePolicy(PolicyName.SNAPSTREAM, SlotLayout(1, 4, 2), 4, None, evicts=True)


def test_the_layer_that_keeps_least_bounds_exact_prompts() -> None:
    policy = replace(POLICIES["snapstream"], layer_kept=(1, 4, 4))
    assert policy.max_exact_prompt == 2 + 5 + 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_prompt_is_exact_up_to_the_longest_exact_one(policy: CachePolicy) -> None:
    assert simulate(policy, policy.max_exact_prompt).is_exact
    assert not simulate(policy, policy.max_exact_prompt + 1).is_exact


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_direct_prompt_is_held_in_its_order(policy: CachePolicy) -> None:
    def entries(num_tokens: int) -> list[int]:
        return [policy.place(num_tokens).direct_entry(index) for index in range(num_tokens)]

    longest = policy.max_direct_tokens
    assert entries(longest) == list(range(longest))
    assert entries(longest + 1) != list(range(longest + 1))


@pytest.mark.parametrize("name", ["full", "snapkv"])
@pytest.mark.parametrize("num_prompt_tokens", range(1, 13))
def test_a_policy_that_does_not_evict_admits_a_full_ring_and_no_more(
    name: str, num_prompt_tokens: int
) -> None:
    policy = POLICIES[name]
    slot = simulate(policy, num_prompt_tokens)
    num_admitted = policy.max_output_tokens(num_prompt_tokens, max_model_len=1000)
    for _ in range(num_admitted):
        slot.write()
    assert slot.num_overwritten == 0
    slot.write()
    assert slot.num_overwritten == 1


@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 60), st.integers(1, 40))
@settings(deadline=None)
def test_no_policy_admits_more_than_the_longest_sequence(
    name: str, num_prompt_tokens: int, max_model_len: int
) -> None:
    policy = POLICIES[name]
    admitted = policy.max_output_tokens(num_prompt_tokens, max_model_len)
    if policy.evicts:
        assert num_prompt_tokens + admitted == max_model_len
    else:
        assert num_prompt_tokens + admitted <= max_model_len


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 3, 11, 12, 13, 40])
@pytest.mark.parametrize("num_output_tokens", [1, 4, 5, 30])
def test_the_needed_capacity_is_the_smallest_that_admits(
    num_prompt_tokens: int, num_output_tokens: int
) -> None:
    needed = POLICIES["full"].needed_capacity(num_prompt_tokens, num_output_tokens)
    admitted = [
        full(capacity).max_output_tokens(num_prompt_tokens, 1000) for capacity in (max(needed - 1, 1), needed)
    ]
    assert admitted[0] < num_output_tokens <= admitted[1]
    needed = POLICIES["snapkv"].needed_capacity(num_prompt_tokens, num_output_tokens)
    slots = [
        SlotLayout(0, needed - less - 3, 3)
        for less in (1, 0)
        if needed - less - 3 >= SCORER.observation_window
    ]
    admitted = [
        replace(POLICIES["snapkv"], layout=slot).max_output_tokens(num_prompt_tokens, 1000) for slot in slots
    ]
    assert admitted[-1] == num_output_tokens
    assert all(number < num_output_tokens for number in admitted[:-1])


def test_sparse_admits_what_its_store_holds_and_loses_nothing() -> None:
    policy = POLICIES["sparse"]
    assert policy.capacity == 13
    assert [policy.max_output_tokens(length, 1000) for length in (1, 7, 12, 13, 14)] == [12, 6, 1, 0, -1]
    assert policy.needed_capacity(5, 8) == 13
    assert [policy.num_live(4, length) for length in (4, 7, 8, 13)] == [4, 7, 8, 13]
    assert [policy.num_quantized(length) for length in (4, 7, 8, 13)] == [0, 0, 1, 6]


def test_snapkv_admits_its_new_tokens_after_any_prompt() -> None:
    policy = POLICIES["snapkv"]
    assert [
        policy.max_output_tokens(num_prompt_tokens, 1000) for num_prompt_tokens in (1, 2, 3, 500, 998)
    ] == [5, 4, 4, 4, 2]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 40])
def test_a_policy_selects_by_its_own_window(policy: CachePolicy, num_prompt_tokens: int) -> None:
    placement, slot = policy.place(num_prompt_tokens), simulate(policy, num_prompt_tokens)
    assert (placement.ring_size, placement.num_kept_used) == (slot.ring_size, len(slot.kept))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.integers(1, 40),
    st.integers(0, 20),
)
@settings(deadline=None)
def test_live_entries_of_unequal_layers_are_their_average(
    kept: tuple[int, ...], lend_kept: bool, num_prompt_tokens: int, num_more: int
) -> None:
    policy = replace(snapstream(2, 5, 3, SCORER, lend_kept=lend_kept), layer_kept=kept)
    slots = [simulate(policy.of_layer(number), num_prompt_tokens) for number in range(len(kept))]
    for slot in slots:
        for _ in range(num_more):
            slot.write()
    num_tokens = num_prompt_tokens + num_more
    assert policy.num_live(num_prompt_tokens, num_tokens) == sum(
        token is not None for slot in slots for token in slot.entries
    ) // len(kept)
    assert policy.is_exact(num_prompt_tokens, num_tokens) == all(slot.is_exact for slot in slots)
    assert (num_prompt_tokens <= policy.max_exact_prompt) == policy.is_exact(
        num_prompt_tokens, num_prompt_tokens
    )


def test_layers_of_equal_scores_keep_equal_shares() -> None:
    policy = snapstream(2, 5, 8, SCORER)
    assert policy.with_layer_scores([0.3, 0.3], most=100) == policy
    assert policy.with_layer_scores([0.3, 0.3], most=100, leading_layer=0) == policy
    assert policy.with_layer_scores([0.0, 1.0], most=100).layer_kept == (2, 14)
    assert policy.with_layer_scores([0.0, 1.0], most=100, leading_layer=1).leading_layer == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(num_prompt_tokens=st.integers(1, 20))
def test_exact_output_tokens_are_as_many_as_a_slot_holds(policy: CachePolicy, num_prompt_tokens: int) -> None:
    room = policy.exact_output_tokens(num_prompt_tokens, max_model_len=24)
    if room < 0:
        assert not policy.is_exact(num_prompt_tokens, num_prompt_tokens) or num_prompt_tokens > 24 - room
        return
    most = policy.max_output_tokens(num_prompt_tokens, 24)
    # The last token drawn is not written.
    assert room <= most
    assert room == 0 or policy.is_exact(num_prompt_tokens, num_prompt_tokens + room - 1)
    assert room == most or not policy.is_exact(num_prompt_tokens, num_prompt_tokens + room)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_sequence_of_num_exact_tokens_loses_any(policy: CachePolicy) -> None:
    num_exact = policy.num_exact_tokens(max_model_len=24)
    rooms = [policy.exact_output_tokens(length, 24) for length in range(1, num_exact + 1)]
    admitted = [policy.max_output_tokens(length, 24) for length in range(1, num_exact + 1)]
    needed = [num_exact + 1 - length for length in range(1, num_exact + 1)]
    assert all(room >= min(*pair) for room, *pair in zip(rooms, admitted, needed, strict=True))

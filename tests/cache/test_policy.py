"""What the policies are made of, what they refuse, and how long an answer they admit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.layout import SlotLayout
from cache.policy import CachePolicy, PolicyName, full, snapkv, snapstream, streaming_llm
from cache.policy_options import LayerBudgets, PolicyOptions
from cache.scorer import WindowScorer
from tests.cache.simulation import SimulatedSlot

SCORER = WindowScorer(observation_window=2)
POLICIES = {
    "full": full(12),
    "streaming-llm": streaming_llm(2, 5),
    "snapkv": snapkv(max_new_tokens=4, num_kept=3, scorer=SCORER),
    "snapstream": snapstream(2, 5, 3, SCORER),
    "snapstream, kept lent": snapstream(2, 5, 3, SCORER, lend_kept=True),
}


def sizes(policy: CachePolicy) -> tuple[int, int, int, int]:
    layout = policy.layout
    return layout.num_sink, layout.num_recent, layout.num_kept, policy.prompt_window


def simulate(policy: CachePolicy, num_prompt_tokens: int) -> SimulatedSlot:
    return SimulatedSlot(policy.layout, policy.prompt_window, num_prompt_tokens, policy.lend_kept)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PolicyOptions(), (4, 1022, 1022, 1022)),
        (PolicyOptions(slot_capacity=1024), (4, 510, 510, 510)),
        (PolicyOptions(slot_capacity=1025), (4, 511, 510, 511)),
        (PolicyOptions(slot_capacity=1024, num_recent=256), (4, 256, 764, 256)),
        (PolicyOptions(slot_capacity=1024, num_kept=256), (4, 764, 256, 764)),
        (PolicyOptions(num_sink=1, num_recent=40, num_kept=0), (1, 40, 0, 40)),
        (PolicyOptions(PolicyName.FULL), (0, 8192, 0, 8192)),
        (PolicyOptions(PolicyName.STREAMING_LLM, slot_capacity=512), (4, 508, 0, 508)),
        (PolicyOptions(PolicyName.STREAMING_LLM, num_sink=0, num_recent=100), (0, 100, 0, 100)),
        (PolicyOptions(PolicyName.SNAPKV), (0, 1024, 1024, 32)),
        (PolicyOptions(PolicyName.SNAPKV, num_recent=100, num_kept=50), (0, 100, 50, 32)),
    ],
)
def test_sizes_left_out_follow_from_the_others(
    options: PolicyOptions, expected: tuple[int, int, int, int]
) -> None:
    policy = options.resolve(max_model_len=8192)
    assert policy.name is options.name
    assert sizes(policy) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PolicyOptions(), 766),
        (PolicyOptions(lend_ring=False), 0),
        (PolicyOptions(num_recent=40, num_kept=60), 8),  # the observation window stays
        (PolicyOptions(num_recent=40, num_kept=0), 0),
        (PolicyOptions(PolicyName.SNAPKV), 0),
        (PolicyOptions(PolicyName.STREAMING_LLM), 0),
        (PolicyOptions(PolicyName.FULL), 0),
    ],
)
def test_three_quarters_of_a_ring_are_lent_where_there_is_a_choice(
    options: PolicyOptions, expected: int
) -> None:
    assert options.resolve(max_model_len=8192).num_lent == expected


def test_a_slot_is_no_larger_than_the_longest_sequence_unless_asked() -> None:
    assert PolicyOptions().resolve(max_model_len=500).layout.capacity == 500
    assert PolicyOptions(slot_capacity=700).resolve(max_model_len=500).layout.capacity == 700


@pytest.mark.parametrize("name", list(PolicyName))
def test_only_rings_that_are_made_for_it_evict(name: PolicyName) -> None:
    policy = PolicyOptions(name).resolve(max_model_len=8192)
    assert policy.evicts == (name in {PolicyName.STREAMING_LLM, PolicyName.SNAPSTREAM})
    assert (policy.scorer is not None) == (name in {PolicyName.SNAPKV, PolicyName.SNAPSTREAM})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            PolicyOptions(PolicyName.FULL, num_sink=4),
            "num_sink is not an option of policy full, whose sizes are slot_capacity",
        ),
        (
            PolicyOptions(PolicyName.STREAMING_LLM, num_kept=8),
            "num_kept is not an option of policy streaming-llm",
        ),
        (PolicyOptions(PolicyName.SNAPKV, num_sink=8), "num_sink is not an option of policy snapkv"),
        (PolicyOptions(PolicyName.SNAPKV, lend_kept=True), "lend_kept is not an option of policy snapkv"),
        (
            PolicyOptions(PolicyName.STREAMING_LLM, lend_ring=True),
            "lend_ring is not an option of policy streaming-llm",
        ),
        (
            PolicyOptions(PolicyName.SNAPKV, share_votes=True),
            "share_votes needs policy snapstream with layer_budgets measured",
        ),
        (PolicyOptions(layer_budgets=LayerBudgets.EQUAL, share_votes=True), "share_votes needs"),
        (
            PolicyOptions(PolicyName.SNAPKV, layer_budgets=LayerBudgets.MEASURED),
            "layer_budgets measured is not an option of policy snapkv",
        ),
        (
            PolicyOptions(slot_capacity=100, num_sink=4, num_recent=50, num_kept=50),
            "slot_capacity is 100, but .* = 104",
        ),
        (
            PolicyOptions(slot_capacity=40, num_recent=50),
            "slot_capacity must be at least 54 .* num_recent 50, .* got 40",
        ),
        (
            PolicyOptions(slot_capacity=40, num_kept=36),
            "slot_capacity must be at least 72 .* num_kept 36, .* got 40",
        ),
        (PolicyOptions(num_kept=2040), "slot_capacity must be at least 2076 .* got 2048 by default"),
        (PolicyOptions(num_sink=-1), "num_sink ≥ 0, .* got -1"),
        (PolicyOptions(num_kept=-1), "num_kept ≥ 0, .* and -1"),
        (
            PolicyOptions(PolicyName.STREAMING_LLM, num_recent=0),
            "num_recent must be at least 1 for policy streaming-llm, got 0",
        ),
        (
            PolicyOptions(slot_capacity=66),
            "must be at least 67 for policy snapstream with num_sink 4, observation_window 32, got 66",
        ),
        (
            PolicyOptions(PolicyName.SNAPKV, slot_capacity=64),
            "must be at least 65 for policy snapkv with observation_window 32, got 64",
        ),
        (
            PolicyOptions(PolicyName.FULL, slot_capacity=0),
            "slot_capacity must be at least 1 for policy full, got 0",
        ),
        (
            PolicyOptions(num_recent=31),
            "num_recent must be at least 32 for policy snapstream with observation_window 32, got 31",
        ),
        (
            PolicyOptions(PolicyName.SNAPKV, num_recent=32),
            "num_recent must be at least 33 for policy snapkv .* got 32",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(options: PolicyOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.resolve(max_model_len=8192)


SIZES: dict[PolicyName, list[dict[str, Any]]] = {
    PolicyName.FULL: [{}],
    PolicyName.STREAMING_LLM: [{}, {"num_sink": 0}, {"num_sink": 9}],
    PolicyName.SNAPKV: [{}, {"num_recent": 80}, {"num_kept": 0}, {"num_kept": 50}],
    PolicyName.SNAPSTREAM: [
        {},
        {"num_sink": 0},
        {"num_sink": 9},
        {"num_recent": 80},
        {"num_kept": 0},
        {"num_sink": 1, "num_kept": 50},
    ],
}


@pytest.mark.parametrize("observation_window", [1, 16, 32, 64])
@pytest.mark.parametrize("lend_ring", [None, False, True])
@pytest.mark.parametrize("name", list(PolicyName))
def test_the_least_capacity_is_the_least(
    name: PolicyName, lend_ring: bool | None, observation_window: int
) -> None:
    for given_sizes in SIZES[name]:
        options = PolicyOptions(
            name,
            scorer=WindowScorer(observation_window=observation_window),
            lend_ring=lend_ring if name is PolicyName.SNAPSTREAM else None,
            **given_sizes,
        )
        least = options.least_capacity
        assert replace(options, slot_capacity=least).resolve(max_model_len=8192).layout.capacity == least
        for capacity in range(least):
            with pytest.raises(
                ValueError,
                match=f"slot_capacity must be at least {least} for policy {name}.*, got {capacity}$",
            ):
                replace(options, slot_capacity=capacity).resolve(max_model_len=8192)


@pytest.mark.parametrize("prompt_window", [0, 5])
def test_the_prompt_window_lies_within_the_ring(prompt_window: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to num_recent = 4, got {prompt_window}"):
        CachePolicy(PolicyName.STREAMING_LLM, SlotLayout(1, 4, 0), prompt_window, None, evicts=True)


def test_kept_entries_need_a_scorer() -> None:
    with pytest.raises(ValueError, match="num_kept = 2 needs a scorer"):
        CachePolicy(PolicyName.SNAPSTREAM, SlotLayout(1, 4, 2), 4, None, evicts=True)


@pytest.mark.parametrize("pooling_size", [0, 4, -3])
def test_a_pooling_window_has_a_centre(pooling_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {pooling_size}"):
        WindowScorer(pooling_size=pooling_size)


@pytest.mark.parametrize("pooling_shift", [-1, 3])
def test_a_shifted_window_still_holds_its_token(pooling_shift: int) -> None:
    with pytest.raises(
        ValueError, match=f"pooling_shift must be from 0 to half the pooling_size of 5, got {pooling_shift}"
    ):
        WindowScorer(pooling_shift=pooling_shift)


def test_a_chunk_has_a_token() -> None:
    with pytest.raises(ValueError, match="selection_chunk must be at least 1, got 0"):
        WindowScorer(selection_chunk=0)


def test_someone_observes() -> None:
    with pytest.raises(ValueError, match="observation_window must be at least 1, got 0"):
        WindowScorer(observation_window=0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_longest_direct_prompt_is_the_longest_of_which_nothing_is_lost(policy: CachePolicy) -> None:
    assert simulate(policy, policy.max_direct_tokens).is_exact
    assert not simulate(policy, policy.max_direct_tokens + 1).is_exact


@pytest.mark.parametrize("name", ["full", "snapkv"])
@pytest.mark.parametrize("num_prompt_tokens", range(1, 13))
def test_a_policy_that_does_not_evict_admits_as_many_tokens_as_its_ring_takes(
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
def test_a_slot_of_the_needed_capacity_admits_and_a_smaller_one_does_not(
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


def test_snapkv_admits_what_it_was_made_for() -> None:
    policy = POLICIES["snapkv"]
    assert [
        policy.max_output_tokens(num_prompt_tokens, 1000) for num_prompt_tokens in (1, 2, 3, 500, 998)
    ] == [5, 4, 4, 4, 2]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 40])
def test_a_policy_places_prompts_by_its_own_window(policy: CachePolicy, num_prompt_tokens: int) -> None:
    placement, slot = policy.place(num_prompt_tokens), simulate(policy, num_prompt_tokens)
    assert (placement.ring_size, placement.num_kept_used) == (slot.ring_size, len(slot.kept))


def test_only_snapstream_measures_its_layers_and_not_if_they_are_to_be_equal() -> None:
    assert [name for name in PolicyName if PolicyOptions(name).measures_layers] == [PolicyName.SNAPSTREAM]
    assert not PolicyOptions(layer_budgets=LayerBudgets.EQUAL).measures_layers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PolicyOptions(), True),
        (PolicyOptions(share_votes=False), False),
        (PolicyOptions(layer_budgets=LayerBudgets.EQUAL), False),
        (PolicyOptions(PolicyName.SNAPKV), False),
    ],
)
def test_layers_share_votes_where_they_are_measured(options: PolicyOptions, expected: bool) -> None:
    assert options.has_leading_layer == expected


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.integers(1, 40),
    st.integers(0, 20),
)
@settings(deadline=None)
def test_layers_that_keep_unlike_numbers_are_accounted_for_by_their_average(
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
    assert (num_prompt_tokens <= policy.max_direct_tokens) == policy.is_exact(
        num_prompt_tokens, num_prompt_tokens
    )


def test_layers_of_equal_scores_keep_as_much_as_asked() -> None:
    policy = snapstream(2, 5, 8, SCORER)
    assert policy.with_layer_scores([0.3, 0.3], most=100) == policy
    assert policy.with_layer_scores([0.3, 0.3], most=100, leading_layer=0) == policy
    assert policy.with_layer_scores([0.0, 1.0], most=100).layer_kept == (2, 14)
    assert policy.with_layer_scores([0.0, 1.0], most=100, leading_layer=1).leading_layer == 1

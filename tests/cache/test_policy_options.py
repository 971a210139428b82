"""The policies that user options resolve to, their defaults, and the options that are refused."""

from dataclasses import replace
from typing import Any

import pytest

from cache.policy import CachePolicy, PolicyName
from cache.policy_options import LayerBudgets, PolicyOptions
from cache.scorer import WindowScorer


def sizes(policy: CachePolicy) -> tuple[int, int, int, int]:
    layout = policy.layout
    return layout.num_sink, layout.num_recent, layout.num_kept, policy.prompt_window


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
def test_omitted_sizes_follow_from_the_others(
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
        (PolicyOptions(num_recent=32, num_kept=60), 0),
        (PolicyOptions(num_recent=40, num_kept=0), 0),
        (PolicyOptions(PolicyName.SNAPKV), 0),
        (PolicyOptions(PolicyName.STREAMING_LLM), 0),
        (PolicyOptions(PolicyName.FULL), 0),
    ],
)
def test_three_quarters_of_a_ring_are_lent_where_there_are_kept_entries(
    options: PolicyOptions, expected: int
) -> None:
    assert options.resolve(max_model_len=8192).num_lent == expected


@pytest.mark.parametrize("lend_kept", [None, True, False])
def test_snapstream_lends_kept_entries_unless_it_is_switched_off(lend_kept: bool | None) -> None:
    policy = PolicyOptions(lend_kept=lend_kept).resolve(max_model_len=8192)
    assert policy.lend_kept is (lend_kept is not False)


def test_the_default_capacity_is_at_most_the_longest_sequence() -> None:
    assert PolicyOptions().resolve(max_model_len=500).layout.capacity == 500
    assert PolicyOptions(slot_capacity=700).resolve(max_model_len=500).layout.capacity == 700


@pytest.mark.parametrize("name", list(PolicyName))
def test_only_policies_with_a_ring_evict(name: PolicyName) -> None:
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
        (PolicyOptions(PolicyName.SPARSE, num_kept=8), "num_kept is not an option of policy sparse"),
        (PolicyOptions(PolicyName.FULL, num_attended=8), "num_attended is not an option of policy full"),
        (PolicyOptions(PolicyName.SPARSE, num_attended=0), "num_attended must be at least 1, got 0"),
        (
            PolicyOptions(PolicyName.SPARSE, num_recent=100, slot_capacity=90),
            "slot_capacity must be at least 104 for policy sparse with num_sink 4, num_recent 100, got 90",
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
            "slot_capacity must be at least 54 .* num_recent 50, got 40",
        ),
        (
            PolicyOptions(slot_capacity=40, num_kept=36),
            "slot_capacity must be at least 72 .* num_kept 36, got 40",
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
            "must be at least 67 for policy snapstream with num_sink 4, got 66",
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
            "num_recent must be at least 32 for policy snapstream, got 31",
        ),
        (
            PolicyOptions(PolicyName.SNAPKV, num_recent=32),
            "num_recent must be at least 33 for policy snapkv .* got 32",
        ),
    ],
)
def test_impossible_options_are_refused_with_their_values(options: PolicyOptions, message: str) -> None:
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
    PolicyName.SPARSE: [{}, {"num_sink": 0}, {"num_recent": 80}, {"num_attended": 7}],
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
        assert replace(options, slot_capacity=least).resolve(max_model_len=8192).capacity == least
        for capacity in range(least):
            with pytest.raises(
                ValueError,
                match=f"slot_capacity must be at least {least} for policy {name}.*, got {capacity}$",
            ):
                replace(options, slot_capacity=capacity).resolve(max_model_len=8192)


@pytest.mark.parametrize(
    ("options", "max_model_len", "expected"),
    [
        ({}, 8192, (4, 124, 8064, 256)),
        ({}, 2048, (4, 124, 1920, 128)),
        ({}, 200, (4, 124, 72, 72)),  # a store with fewer tokens than a step may attend to
        ({"slot_capacity": 1000, "num_attended": 5}, 8192, (4, 124, 872, 5)),
        ({"slot_capacity": 9000}, 8192, (4, 124, 8064, 256)),
        ({"num_sink": 0, "num_recent": 60}, 1024, (0, 60, 964, 128)),
    ],
)
def test_sizes_of_sparse(
    options: dict[str, Any], max_model_len: int, expected: tuple[int, int, int, int]
) -> None:
    policy = PolicyOptions(PolicyName.SPARSE, **options).resolve(max_model_len)
    assert policy.store is not None
    layout = policy.layout
    assert (
        layout.num_sink,
        layout.num_recent,
        policy.store.num_tokens,
        policy.store.num_attended,
    ) == expected


def test_sparse_without_tokens_beyond_its_ring_needs_no_store() -> None:
    policy = PolicyOptions(PolicyName.SPARSE).resolve(max_model_len=100)
    assert (policy.capacity, policy.store) == (100, None)


def test_only_snapstream_with_measured_budgets_measures_its_layers() -> None:
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
def test_layers_share_votes_only_where_they_are_measured(options: PolicyOptions, expected: bool) -> None:
    assert options.has_leading_layer == expected

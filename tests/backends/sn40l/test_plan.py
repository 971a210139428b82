"""Planning: the cheapest way is the cheapest, and meets its level."""

import pytest

from backends.sn40l.backend import default_deployment
from backends.sn40l.deployment import Execution
from backends.sn40l.placement import DoesNotFitError
from backends.sn40l.plan import ServiceLevel, options, plan, socket_counts
from backends.sn40l.sweep import SweepAxes, sweep
from cache.policy import PolicyName, full
from cache.policy_options import PolicyOptions

SNAPSTREAM = PolicyOptions(slot_capacity=8192)


def test_cheapest_meets_the_level_with_fewest_sockets() -> None:
    deployment = default_deployment("llama-3.1-8b", "sn40l", 1)
    level = ServiceLevel(max_ttft=5, max_tpot=0.005, min_rate=1000)
    ways = plan(deployment, socket_counts(16), [SNAPSTREAM.resolve(32768), full(32768)], 32768)
    found = [option for option in ways if level.is_met(option)]
    assert 0 < len(found) < len(ways)
    assert all(option.ttft <= 5 and option.tpot <= 0.005 and option.rate >= 1000 for option in found)
    fewest = min(option.deployment.num_sockets for option in found)
    assert found[0].deployment.num_sockets == fewest
    assert found[0].rate == max(option.rate for option in found if option.deployment.num_sockets == fewest)


def test_nothing_cheaper_was_overlooked() -> None:
    deployment = default_deployment("llama-3.1-8b", "sn40l", 1)
    level = ServiceLevel(max_tpot=0.002)
    best = next(
        option for option in plan(deployment, socket_counts(16), [full(32768)], 32768) if level.is_met(option)
    )
    assert best.deployment.num_sockets > 1
    for count in socket_counts(best.deployment.num_sockets - 1):
        smaller = default_deployment("llama-3.1-8b", "sn40l", count)
        assert not any(level.is_met(option) for option in options(smaller, full(32768), 32768))


def test_only_the_requested_sockets_are_tried() -> None:
    ways = plan(default_deployment("llama-3.1-8b", "sn40l", 1), [12, 4], [full(4096)], 4096)
    assert [option.deployment.num_sockets for option in ways] == sorted(
        option.deployment.num_sockets for option in ways
    )
    assert {option.deployment.num_sockets for option in ways} == {4, 12}
    assert socket_counts(16) == (1, 2, 4, 8, 16)


def test_a_model_beyond_the_machine_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match="GB are missing"):
        plan(default_deployment("llama-3.1-405b", "dgx-h100", 1), socket_counts(8), [full(4096)], 4096)


def test_compression_multiplies_the_slots_of_deepseek_r1() -> None:
    """The published gain is batch capacity: four times the slots in four times less cache each."""
    deployment = default_deployment("deepseek-r1", "sn40l", 16, loops=False)
    most = {
        policy.name: max(option.num_slots for option in options(deployment, policy, 131072))
        for policy in (full(131072), PolicyOptions(slot_capacity=32768).resolve(131072))
    }
    assert most == {PolicyName.FULL: 16, PolicyName.SNAPSTREAM: 64}


def test_a_sweep_has_every_combination_and_reports_missing_ones() -> None:
    axes = SweepAxes(
        [1, 64],
        [8192, 131072],
        [8, 16],
        [PolicyOptions(PolicyName.FULL), SNAPSTREAM],
        [Execution.FUSED, Execution.LOOPED],
    )
    rows = list(sweep(default_deployment("deepseek-r1", "sn40l", 1), axes))
    assert len(rows) == 32
    assert all((row.option is None) == (row.missing > 0) for row in rows)
    assert any(row.option is None for row in rows)
    assert any(row.option is not None for row in rows)

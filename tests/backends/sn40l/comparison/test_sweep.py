"""Sweeps, and the slots that fit."""

from backends.sn40l.backend import default_deployment
from backends.sn40l.comparison.plan import socket_counts
from backends.sn40l.comparison.sweep import SweepAxes, sweep
from backends.sn40l.step.deployment import DecodeShape, Execution
from backends.sn40l.step.placement import max_batch
from cache.policy import PolicyName, full
from cache.policy_options import PolicyOptions

SNAPSTREAM = PolicyOptions(slot_capacity=8192)


def test_socket_counts_are_powers_of_two() -> None:
    assert socket_counts(16) == (1, 2, 4, 8, 16)
    assert socket_counts(1) == (1,)


def test_compression_multiplies_the_slots_of_deepseek_r1() -> None:
    """The published gain is batch capacity: four times the slots in four times less cache each."""
    deployment = default_deployment("deepseek-r1", "sn40l", 16, loops=False)
    most = {
        policy.name: max_batch(deployment, DecodeShape.of(policy, 1))
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

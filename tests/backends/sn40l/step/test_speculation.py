"""Speculative decoding: its time, and what an acceptance makes of it."""

import pytest

from backends.fake import slot_pool
from backends.interface import DecodeBatch, DecodeRow, Draw, SamplingParams
from backends.sn40l.step.cost_model import DeploymentCost
from backends.sn40l.step.decode import decode_seconds
from backends.sn40l.step.deployment import DecodeShape, Deployment, Execution
from backends.sn40l.step.speculation import Speculation, expected_tokens, token_seconds
from cache.policy import full
from tests.backends.sn40l.strategies import model, sn40l

SHAPE = DecodeShape(1, 4096)


def deployment(name: str = "llama-3.1-70b") -> Deployment:
    return Deployment(model(name), sn40l(), 16, Execution.LOOPED)


def speculation(acceptance: float) -> Speculation:
    return Speculation(model("llama-3.2-1b"), 5, acceptance)


def test_expected_tokens_are_those_of_independent_drafts() -> None:
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(0.5, 2) == 1.75


def test_a_step_drafts_and_verifies() -> None:
    drafts = 5 * decode_seconds(deployment("llama-3.2-1b"), SHAPE)
    verification = decode_seconds(deployment(), DecodeShape(6, 4096 // 6))
    step = token_seconds(deployment(), SHAPE, speculation(0.0))
    assert step == pytest.approx(drafts + verification)
    assert token_seconds(deployment(), SHAPE, speculation(0.8)) == pytest.approx(
        step / expected_tokens(0.8, 5)
    )
    assert token_seconds(deployment(), SHAPE, None) == decode_seconds(deployment(), SHAPE)


def test_it_pays_with_a_high_acceptance_only() -> None:
    plain, low, high = (
        token_seconds(deployment(), SHAPE, chosen) for chosen in (None, speculation(0.1), speculation(0.9))
    )
    assert high < plain < low


def test_a_replayed_step_takes_what_a_token_takes_on_average() -> None:
    cost = DeploymentCost(deployment(), slot_pool(1, full(4096), 4096), speculation=speculation(0.9))
    row = DecodeRow("a", 0, 0, 9, 9, Draw(SamplingParams(temperature=0.0)))
    assert cost.seconds(DecodeBatch((row,), 3)) == pytest.approx(
        3 * token_seconds(deployment(), SHAPE, speculation(0.9))
    )

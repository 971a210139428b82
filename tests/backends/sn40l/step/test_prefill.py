"""Reading prompts: tiles, chunks, and the same physics as decode."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sn40l.description.hardware import load_machine
from backends.sn40l.step.deployment import Deployment, Execution
from backends.sn40l.step.prefill import Chunk, Compression, prefill_seconds, prefill_step
from tests.backends.sn40l.strategies import model, models, roomy

ROUNDING = 1 + 1e-9
ATTENTION_TILE = 8192


@settings(deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 40_000))
def test_tiles_cover_every_causal_pair_and_not_much_more(num_tokens: int, start: int) -> None:
    causal = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    pairs = Chunk(num_tokens, start).num_pairs(ATTENTION_TILE)
    assert causal <= pairs <= causal + num_tokens * ATTENTION_TILE


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 3))
def test_tiles_are_those_of_a_plain_loop(num_tiles: int, rest: int) -> None:
    num_tokens, start, expected = num_tiles * ATTENTION_TILE + rest, 100, 0
    for first in range(0, num_tokens, ATTENTION_TILE):
        size = min(ATTENTION_TILE, num_tokens - first)
        expected += size * (start + first + size)
    assert Chunk(num_tokens, start).num_pairs(ATTENTION_TILE) == expected


@settings(deadline=None)
@given(models, st.sampled_from((1, 2, 4, 8)), st.integers(1, 140_000), st.integers(0, 100_000))
def test_doubling_sockets_never_more_than_doubles(
    which: Any, num_sockets: int, num_tokens: int, start: int
) -> None:
    chunk = Chunk(num_tokens, start)
    one = prefill_step(Deployment(which, roomy(), num_sockets), chunk)
    two = prefill_step(Deployment(which, roomy(), 2 * num_sockets), chunk)
    assert 2 * two.seconds * ROUNDING >= one.seconds


@settings(deadline=None)
@given(models, st.integers(1, 50_000), st.integers(1, 5_000))
def test_more_tokens_take_longer(which: Any, num_tokens: int, more: int) -> None:
    deployment = Deployment(which, roomy(), 16)
    assert (
        prefill_step(deployment, Chunk(num_tokens)).seconds
        <= prefill_step(deployment, Chunk(num_tokens + more)).seconds * ROUNDING
    )


def test_chunks_compute_what_the_whole_does() -> None:
    """Up to the tiles: a chunk's own block is computed whole."""
    deployment = Deployment(model("llama-3.1-8b"), roomy(), 16)
    whole = prefill_step(deployment, Chunk(4 * ATTENTION_TILE))
    parts = [prefill_step(deployment, Chunk(ATTENTION_TILE, index * ATTENTION_TILE)) for index in range(4)]
    assert sum(part.operations for part in parts) == pytest.approx(whole.operations, rel=1e-4)


def test_compression_costs_a_few_percent_of_a_long_prompt() -> None:
    deployment = Deployment(model("deepseek-r1"), roomy(), 16)
    plain = prefill_step(deployment, Chunk(131072)).seconds
    compressed = prefill_step(deployment, Chunk(131072, compression=Compression(16384, 16384))).seconds
    assert 1.01 < compressed / plain < 1.05


def test_unfused_prefill_launches_eleven_times_as_often() -> None:
    steps = [
        prefill_step(Deployment(model("llama-3.1-8b"), roomy(), 8, how), Chunk(4096))
        for how in (Execution.OPERATORS, Execution.FUSED)
    ]
    assert (steps[0].num_calls - 1) / (steps[1].num_calls - 1) == 11
    assert steps[0].seconds > steps[1].seconds


def test_a_gpu_reads_products_and_attention_one_after_the_other() -> None:
    """An SN40L has them as stages of one pipeline."""
    chunk = Chunk(32_000)
    apart = {"products": 0.0, "attention": 0.0}
    deployment = Deployment(model("llama-3.1-8b"), load_machine("h100"), 1)
    for event in prefill_step(deployment, chunk).events:
        if event.kernel:
            bounds = event.kernel.bounds(deployment.machine)
            apart = {name: total + bounds[name] for name, total in apart.items()}
    assert prefill_seconds(deployment, chunk) == pytest.approx(sum(apart.values()), rel=0.02)
    pipeline = replace(deployment, machine=replace(deployment.machine, overlaps_stages=True))
    assert prefill_seconds(pipeline, chunk) == pytest.approx(max(apart.values()), rel=0.02)

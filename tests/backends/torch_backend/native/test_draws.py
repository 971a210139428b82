"""The kernel draws the same tokens as torch's operations."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.interface import Draw, SamplingParams
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported, load_kernels
from backends.torch_backend.sampling.filtering import score_threshold
from backends.torch_backend.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _random_draws(num_slots: int, seed: int) -> dict[int, Draw]:
    """Return draws of every kind for most of the slots."""
    choose = random.Random(seed)
    return {
        slot: Draw(
            SamplingParams(
                temperature=choose.choice([0.0, 0.3, 1.0, 1.7]),
                top_p=choose.choice([0.0, 0.1, 0.7, 0.95, 0.999, 1.0]),
                min_p=choose.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
                top_k=choose.choice([0, 0, 1, 7, 50, 999, 2**40]),
                seed=choose.randrange(-(2**63), 2**64),
            ),
            choice=choose.randrange(9),
            output_index=choose.randrange(2**20),
        )
        for slot in range(num_slots)
        if choose.random() < 0.9
    }


@pytest.mark.parametrize(
    "spread",
    [0.02, 1, 4],  # of the logits: from nearly uniform probabilities to a few likely tokens
)
@pytest.mark.parametrize("vocab_size", [5, 1000, 33_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_equal_those_of_torch(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    """In bfloat16 many logits are equal. Some tokens are banned."""
    num_slots = 24
    plain, native = (
        Sampler(num_slots, vocab_size, torch.device("cpu"), Kernels(are_used)) for are_used in (False, True)
    )
    for seed in range(5):
        logits = spread * _random(num_slots, vocab_size, dtype=dtype, seed=seed)
        logits[_random(num_slots, vocab_size, dtype=torch.float32, seed=-seed) > 1] = -torch.inf
        logits[:, seed] = 0
        draws = _random_draws(num_slots, seed)
        expected, found = (
            sampler.sample(logits, sampler.plan(draws), step=3).token_ids for sampler in (plain, native)
        )
        assert [int(found[slot]) for slot in draws] == [int(expected[slot]) for slot in draws]
        slot, other = list(draws)[:2]
        alone = native.sample(logits[[other, slot]], native.plan({1: draws[slot]}, 2), step=3).token_ids
        assert alone[1] == found[slot]


def test_filters_keep_the_same_tokens_as_torch() -> None:
    """4000 draws suffice for each token that the filters leave to be drawn."""
    num_draws, vocab_size = 4000, 30
    logits = _random(1, vocab_size, dtype=torch.float32).bfloat16()
    plain, native = (
        Sampler(num_draws, vocab_size, torch.device("cpu"), Kernels(are_used)) for are_used in (False, True)
    )
    for top_k, top_p, min_p in itertools.product([0, 3, 12], [0.3, 0.8, 1.0], [0.0, 0.2]):
        params = SamplingParams(temperature=3.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=6)
        draws = {slot: Draw(params, output_index=slot) for slot in range(num_draws)}
        rows = logits.expand(num_draws, vocab_size)
        expected, found = (sampler.sample(rows, sampler.plan(draws)).token_ids for sampler in (plain, native))
        assert torch.equal(found, expected)
        limits = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
        scores = (logits.float() - logits.max()) / 3
        assert (
            sorted(set(found.tolist()))
            == (scores >= score_threshold(scores, *limits))[0].nonzero()[:, 0].tolist()
        )


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [100, 2000])
def test_nan_and_infinite_logits_draw_a_token_of_the_vocabulary(
    filler: float, top_p: float, vocab_size: int
) -> None:
    sampler = Sampler(3, vocab_size, torch.device("cpu"), Kernels(are_used=True))
    draws = {slot: Draw(SamplingParams(temperature=slot / 2, top_p=top_p, top_k=10)) for slot in range(3)}
    for logits in (
        torch.full((3, vocab_size), filler),
        torch.cat([torch.zeros(3, 60), torch.full((3, vocab_size - 60), filler)], dim=1),
    ):
        tokens = sampler.sample(logits, sampler.plan(draws)).token_ids
        assert bool(((tokens >= 0) & (tokens < vocab_size)).all())


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_nan_in_a_part_of_the_vocabulary_draws_a_finite_logit(top_p: float) -> None:
    """The highest scores of segments are compared. Of half of them they are NaN here."""
    num_slots, vocab_size, top_k = 200, 40 * 512, 30
    sampler = Sampler(num_slots, vocab_size, torch.device("cpu"), Kernels(are_used=True))
    logits = _random(num_slots, vocab_size, dtype=torch.float32)
    logits.view(num_slots, 40, 512)[:, ::2] = torch.nan
    params = SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k)
    draws = {slot: Draw(params, output_index=slot) for slot in range(num_slots)}
    tokens = sampler.sample(logits, sampler.plan(draws)).token_ids
    highest = logits.nan_to_num(-torch.inf).topk(top_k).indices
    assert bool((highest == tokens[:, None]).any(dim=1).all())


def test_a_nucleus_wider_than_its_guess_is_that_of_torch() -> None:
    """Every segment has one likely token, and together they lack a quarter of the mass of `top_p`.

    The others are only just heavy enough to belong to it.
    """
    num_slots, vocab_size = 200, 40 * 512
    logits = torch.full((1, vocab_size), -3.0)
    logits[:, ::512] = 0.0
    rows = logits.expand(num_slots, vocab_size)
    params = SamplingParams(temperature=1.0, top_p=0.05)
    draws = {slot: Draw(params, output_index=slot) for slot in range(num_slots)}
    expected, found = (
        sampler.sample(rows, sampler.plan(draws)).token_ids
        for sampler in (
            Sampler(num_slots, vocab_size, torch.device("cpu"), Kernels(are_used))
            for are_used in (False, True)
        )
    )
    assert torch.equal(found, expected)
    assert bool((logits[0, found] < 0).any())

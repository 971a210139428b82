"""Sampling, with and without the kernels, against transformers' processors, softmax and statistics."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from backends.interface import Draw, SampledToken, SamplingParams
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported, load_kernels
from backends.torch_backend.sampling.logprobs import steps_to_host
from backends.torch_backend.sampling.sampler import Sampler

NUM_SLOTS, VOCAB_SIZE = 4, 60
GREEDY = SamplingParams(temperature=0.0)
CHANCE = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=5)
WAYS = ["torch", "native"] if kernels_are_supported() else ["torch"]


@pytest.fixture(scope="module", params=WAYS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "native":
        path: Path = request.getfixturevalue("built_kernels")
        load_kernels(path)
    return Kernels(are_used=request.param == "native")


@pytest.fixture
def sampler(kernels: Kernels) -> Sampler:
    return _sampler(kernels)


def _sampler(kernels: Kernels, num_slots: int = NUM_SLOTS) -> Sampler:
    return Sampler(num_slots, VOCAB_SIZE, torch.device("cpu"), kernels)


def _logits(seed: int = 0) -> Tensor:
    return 2 * torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def _drawn(sampler: Sampler, logits: Tensor, draws: Mapping[int, Draw], number: int = 0) -> dict[int, int]:
    sampled = sampler.sample(logits, sampler.plan(draws), number)
    return {slot: token.token_id for slot, token in sampled.to_host(dict.fromkeys(draws)).items()}


def _frequencies(
    logits: Tensor, params: SamplingParams, num_choices: int, num_steps: int, kernels: Kernels
) -> Tensor:
    """Return how often each token is drawn from `logits` [token]."""
    sampler = _sampler(kernels, num_choices)
    plan = sampler.plan({choice: Draw(params, choice=choice) for choice in range(num_choices)})
    rows = logits.repeat(num_choices, 1)
    drawn = torch.cat([sampler.sample(rows, plan, number).token_ids for number in range(num_steps)])
    return torch.bincount(drawn, minlength=VOCAB_SIZE)


def test_greedy_takes_the_best(sampler: Sampler) -> None:
    logits = _logits()
    assert _drawn(sampler, logits, {1: Draw(GREEDY), 3: Draw(GREEDY)}) == {
        1: int(logits[1].argmax()),
        3: int(logits[3].argmax()),
    }


def test_greedy_beside_chance_stays_greedy(sampler: Sampler) -> None:
    logits = _logits()
    assert _drawn(sampler, logits, {0: Draw(CHANCE), 1: Draw(GREEDY)})[1] == int(logits[1].argmax())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(kernels: Kernels, temperature: float) -> None:
    logits = _logits()[0]
    observed = _frequencies(
        logits,
        SamplingParams(temperature=temperature, seed=11),
        num_choices=500,
        num_steps=20,
        kernels=kernels,
    )
    expected = 10_000 * (logits / temperature).softmax(dim=-1)
    is_likely = expected >= 5  # the others make one class together
    pairs = [
        (observed[is_likely], expected[is_likely]),
        (observed[~is_likely].sum()[None], expected[~is_likely].sum()[None]),
    ]
    chi_square = sum(float(((seen - due) ** 2 / due).sum()) for seen, due in pairs)
    freedom = int(is_likely.sum())
    assert chi_square < freedom + 3.1 * (2 * freedom) ** 0.5 + 5  # beyond the 99.9th percentile


def test_draws_keep_to_the_filters(kernels: Kernels) -> None:
    logits = _logits()[0]
    observed = _frequencies(
        logits,
        SamplingParams(temperature=1.0, top_k=3, seed=2),
        num_choices=300,
        num_steps=1,
        kernels=kernels,
    )
    assert set(observed.nonzero()[:, 0].tolist()) == set(logits.topk(3).indices.tolist())


def test_a_tiny_temperature_is_greedy(sampler: Sampler) -> None:
    logits = _logits()
    assert _drawn(sampler, logits, {2: Draw(replace(CHANCE, temperature=1e-30))})[2] == int(
        logits[2].argmax()
    )


@pytest.mark.parametrize(
    "neighbour",
    [GREEDY, SamplingParams(seed=9), replace(CHANCE, top_p=0.2), replace(CHANCE, frequency_penalty=1.0)],
)
def test_a_seed_knows_no_neighbours(kernels: Kernels, neighbour: SamplingParams) -> None:
    row = _logits()[:1]
    alone, crowded = (_sampler(kernels) for _ in range(2))
    for number in range(30):
        logits = torch.cat([row, _logits(number)[1:]])
        mine = Draw(CHANCE, choice=2, output_index=number)
        expected = _drawn(alone, logits, {0: mine})[0]
        others = {slot: Draw(neighbour, output_index=number) for slot in (0, 1, 3)}
        assert _drawn(crowded, logits[[1, 2, 0, 3]], others | {2: mine})[2] == expected


def test_several_steps_equal_single_steps(sampler: Sampler) -> None:
    logits = _logits()
    plan = sampler.plan({0: Draw(CHANCE, output_index=4)})
    together = [int(sampler.sample(logits, plan, number).token_ids[0]) for number in range(10)]
    assert together == [
        _drawn(sampler, logits, {0: Draw(CHANCE, output_index=4 + number)})[0] for number in range(10)
    ]
    assert len(set(together)) > 1


def test_repetition_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    logits = _logits()[:1].repeat(NUM_SLOTS, 1)
    first, second, *_ = logits[0].topk(2).indices.tolist()  # only the penalty keeps them from being drawn
    prompt = [first, 9, 9, second]
    params = SamplingParams(temperature=0.0, repetition_penalty=2.5)
    sampler.begin([2])
    sampler.read_prompt([2], prompt[:2])
    sampler.read_prompt([2], prompt[2:])
    processor, seen = RepetitionPenaltyLogitsProcessor(2.5), prompt
    for number in range(8):
        ids: torch.LongTensor = torch.tensor([seen])  # type: ignore[assignment]
        expected = int(processor(ids, logits[:1].clone()).argmax())
        assert _drawn(sampler, logits, {2: Draw(params, output_index=number)}) == {2: expected}
        seen = [*seen, expected]
    assert first != seen[len(prompt)] != second


def test_frequency_and_presence_penalties_count_the_output(sampler: Sampler) -> None:
    logits = torch.zeros(NUM_SLOTS, VOCAB_SIZE)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.1])
    sampler.begin([0, 1])
    sampler.read_prompt([0, 1], [0])  # a prompt does not count
    draws = {
        0: SamplingParams(temperature=0.0, frequency_penalty=0.6),
        1: SamplingParams(temperature=0.0, presence_penalty=1.5),
    }
    drawn = [
        _drawn(sampler, logits, {slot: Draw(params, output_index=n) for slot, params in draws.items()})
        for n in range(6)
    ]
    # Frequency: 3, 2.4, 1.8 | 2, … ; presence: each has its 1.5 once.
    assert [tokens[0] for tokens in drawn] == [0, 0, 1, 0, 1, 0]
    assert [tokens[1] for tokens in drawn] == [0, 1, 0, 0, 0, 0]


def test_a_new_sequence_has_no_past(sampler: Sampler) -> None:
    logits, params = _logits(), SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=2.0)
    first = [_drawn(sampler, logits, {1: Draw(params, output_index=number)})[1] for number in range(5)]
    sampler.read_prompt([1], first)
    sampler.begin([1])
    assert [
        _drawn(sampler, logits, {1: Draw(params, output_index=number)})[1] for number in range(5)
    ] == first


def test_forced_tokens_count_as_prompt(sampler: Sampler) -> None:
    logits = torch.zeros(NUM_SLOTS, VOCAB_SIZE)
    logits[:, :3] = torch.tensor([3.0, 2.0, 1.6])
    draws = {
        0: SamplingParams(temperature=0.0, repetition_penalty=2.0),
        1: SamplingParams(temperature=0.0, frequency_penalty=5.0),
        2: GREEDY,
    }
    forced = {slot: Draw(params, forced_token_ids=(0, 1)) for slot, params in draws.items() if slot < 2}
    plan = sampler.plan(forced | {2: Draw(GREEDY)})
    steps = [sampler.sample(logits, plan, step).token_ids.tolist()[:3] for step in range(3)]
    assert steps == [[0, 0, 0], [1, 1, 0], [2, 0, 0]]


def test_steps_with_forced_tokens_keep_the_prompts_of_idle_slots(sampler: Sampler) -> None:
    logits = torch.zeros(NUM_SLOTS, VOCAB_SIZE)
    logits[:, :2] = torch.tensor([3.0, 2.0])
    sampler.read_prompt([3], [0])
    sampler.sample(logits, sampler.plan({0: Draw(GREEDY, forced_token_ids=(5,))}))
    assert _drawn(sampler, logits, {3: Draw(replace(GREEDY, repetition_penalty=2.0))}) == {3: 1}


def test_logit_bias_applies_to_its_request_only(sampler: Sampler) -> None:
    logits = _logits()
    best = int(logits[0].argmax())
    biased = SamplingParams(temperature=0.0, logit_bias=((7, 100.0), (best, -100.0)))
    assert _drawn(sampler, logits, {0: Draw(biased), 1: Draw(GREEDY)}) == {0: 7, 1: int(logits[1].argmax())}
    assert _drawn(sampler, logits, {0: Draw(GREEDY), 1: Draw(biased)}) == {0: best, 1: 7}


@pytest.mark.parametrize("params", [GREEDY, replace(CHANCE, top_k=1)])
def test_banned_tokens_are_never_drawn(sampler: Sampler, params: SamplingParams) -> None:
    logits = _logits()
    best, second = logits[0].topk(2).indices.tolist()
    assert _drawn(sampler, logits, {0: Draw(params, banned_token_ids=(best,)), 1: Draw(params)})[0] == second
    assert _drawn(sampler, logits, {0: Draw(params)})[0] == best


def _mask(*token_ids: int) -> bytes:
    mask = bytearray(max(token_ids) // 8 + 1)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


@pytest.mark.parametrize("params", [GREEDY, replace(CHANCE, temperature=2.0), SamplingParams(seed=1)])
@pytest.mark.parametrize("allowed", [(0,), (59,), (3, 8, 31, 32), tuple(range(60))])
def test_a_mask_leaves_the_tokens_that_it_has_and_their_order(
    sampler: Sampler, params: SamplingParams, allowed: tuple[int, ...]
) -> None:
    for seed in range(10):
        logits = _logits(seed)
        drawn = _drawn(sampler, logits, {0: Draw(params, allowed_mask=_mask(*allowed)), 2: Draw(params)})
        assert drawn[0] in allowed
        assert drawn[2] == _drawn(sampler, logits, {2: Draw(params)})[2]
        if params.is_greedy:
            assert drawn[0] == max(allowed, key=lambda token: float(logits[0, token]))


def test_a_mask_and_a_ban_both_hold(sampler: Sampler) -> None:
    draw = Draw(
        replace(GREEDY, logit_bias=((3, 100.0), (4, 90.0))),
        banned_token_ids=(3,),
        allowed_mask=_mask(3, 4, 5),
    )
    assert _drawn(sampler, _logits(), {1: draw})[1] == 4


def test_masked_draws_follow_the_remaining_distribution(kernels: Kernels) -> None:
    logits, allowed = _logits()[0], [2, 9, 17, 40]
    sampler = _sampler(kernels, 500)
    plan = sampler.plan(
        {slot: Draw(SamplingParams(seed=4), choice=slot, allowed_mask=_mask(*allowed)) for slot in range(500)}
    )
    drawn = torch.cat([sampler.sample(logits.repeat(500, 1), plan, number).token_ids for number in range(20)])
    expected = 10_000 * logits[allowed].softmax(dim=-1)
    observed = torch.bincount(drawn, minlength=VOCAB_SIZE)[allowed]
    assert (
        float(((observed - expected) ** 2 / expected).sum()) < 16.27
    )  # chi-square of 3 degrees of freedom, 99.9 %


def test_logprobs_are_those_of_the_model(sampler: Sampler) -> None:
    logits = _logits()
    bias = ((11, 50.0),)
    plans = {
        0: Draw(replace(CHANCE, logit_bias=bias, num_logprobs=3)),
        1: Draw(replace(GREEDY, num_logprobs=0)),
        2: Draw(GREEDY),
    }
    sampled = sampler.sample(logits, sampler.plan(plans)).to_host(
        {slot: draw.sampling.num_logprobs for slot, draw in plans.items()}
    )
    expected = logits.log_softmax(dim=-1)
    values, ids = expected[0].topk(3)
    assert sampled[0].token_id == 11
    assert sampled[0].logprob == pytest.approx(float(expected[0, 11]))
    assert [token for token, _ in sampled[0].top_logprobs] == ids.tolist()
    assert [value for _, value in sampled[0].top_logprobs] == pytest.approx(values.tolist())
    assert sampled[1].logprob == pytest.approx(float(expected[1].max()))
    assert sampled[1].top_logprobs == ()
    assert sampled[2] == SampledToken(int(logits[2].argmax()))


def test_logprobs_of_named_tokens(sampler: Sampler) -> None:
    logits = _logits()
    draws = {
        0: Draw(replace(CHANCE, num_logprobs=1, logprob_token_ids=(7, 3, 9))),
        1: Draw(replace(GREEDY, num_logprobs=0, logprob_token_ids=(4,))),
        2: Draw(GREEDY),
    }
    tokens = steps_to_host([sampler.sample(logits, sampler.plan(draws))], draws)
    expected = logits.log_softmax(dim=-1)
    for slot, named in ((0, (7, 3, 9)), (1, (4,)), (2, ())):
        found = tokens[slot][0].named_logprobs
        assert [token for token, _ in found] == list(named)
        assert [value for _, value in found] == pytest.approx(expected[slot, list(named)].tolist())


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_is_a_seed(sampler: Sampler, seed: int) -> None:
    draws = [
        _drawn(sampler, _logits(), {0: Draw(SamplingParams(seed=seed), output_index=number)})[0]
        for number in range(20)
    ]
    assert len(set(draws)) > 1

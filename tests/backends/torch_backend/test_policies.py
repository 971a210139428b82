"""Properties of every policy: exact until the first eviction, separate slots, independent draws."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from backends.interface import SampledToken, SamplingParams
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.pool import ALL_ENTRIES
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.contents import assert_same_contents, recipe_of
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.oracle import TOLERANCE, assert_same_logprobs, continue_greedily, random_prompt
from tests.reference.sequence import Sequence, load_reference

CHUNK = 6
MAX_MODEL_LEN = 96
NUM_TOP = 20
OBSERVED = replace(GREEDY, num_logprobs=NUM_TOP)
SCORER = WindowScorer(observation_window=4, pooling_size=3)
POLICIES = {
    "full": PolicyOptions(PolicyName.FULL),
    "streaming-llm": PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=8),
    "snapkv": PolicyOptions(PolicyName.SNAPKV, num_recent=30, num_kept=7, scorer=SCORER),
    "snapstream": PolicyOptions(PolicyName.SNAPSTREAM, num_sink=2, num_recent=8, num_kept=5, scorer=SCORER),
    "snapstream-lent": PolicyOptions(
        PolicyName.SNAPSTREAM, num_sink=2, num_recent=8, num_kept=5, scorer=SCORER, lend_kept=True
    ),
    "sparse": PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=8, num_attended=5),
}
NUM_STEPS = 22  # within snapkv's room


@dataclass(frozen=True)
class Subject:
    backend: TorchBackend
    oracle: PreTrainedModel
    reference: PreTrainedModel

    @property
    def driver(self) -> Driver:
        return Driver(self.backend, CHUNK)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        architecture: save_checkpoint(architecture, folder, seed=1) for architecture in ("llama", "gemma3")
    }


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", policy) for policy in POLICIES),
        ("gemma3", "full"),
        ("gemma3", "snapstream"),
        ("gemma3", "sparse"),
    ],
    ids="-".join,
)
def subject(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[Subject]:
    architecture, policy = request.param
    path = checkpoints[architecture]
    backend = open_backend(path, POLICIES[policy], max_model_len=MAX_MODEL_LEN)
    yield Subject(backend, load_oracle(path), load_reference(path))
    backend.close()


@pytest.mark.parametrize("length", [1, 7, 11, 12, 16, 37])
def test_equal_to_the_reference(subject: Subject, length: int) -> None:
    pool = subject.backend.spec.pools[0]
    request = Request(random_prompt(length), slots=(3,), sampling=OBSERVED)
    subject.driver.run(request, num_tokens=NUM_STEPS, steps_a_launch=7 if length % 2 else 1)
    sequence = Sequence(subject.reference, recipe_of(pool.policy), request.prompt)
    assert request.tokens == sequence.extend(NUM_STEPS)
    assert_same_logprobs(request.outputs[0], sequence.logits, NUM_TOP)
    assert_same_contents(subject.backend, 3, sequence, is_packed=length > pool.max_direct_tokens)


@pytest.mark.parametrize("length", [1, 7, 10, 11, 15, 16, 37])
def test_exact_until_something_is_lost_and_not_after(subject: Subject, length: int) -> None:
    """The oracle's tokens are the input instead of drawn ones, so every step sees the same sequence."""
    request = Request(random_prompt(length, seed=1), sampling=OBSERVED)
    expected = continue_greedily(subject.oracle, request.prompt, NUM_STEPS)
    placement = subject.backend.spec.pools[0].policy.place(length)
    driver = subject.driver
    driver.read(request)
    for step, token_id in enumerate(expected.tokens):
        distance = _distance(request.outputs[0][step], expected.logits[step])
        if step == 0 or placement.is_exact(
            length + step
        ):  # the first token is drawn before anything is packed
            assert distance < TOLERANCE, f"step {step}"
        else:
            assert distance > 10 * TOLERANCE, f"step {step}"
        request.outputs[0][step] = SampledToken(token_id)
        driver.decode(request)


def _distance(token: SampledToken, logits: torch.Tensor) -> float:
    expected = logits.log_softmax(-1)
    return max(abs(value - float(expected[token_id])) for token_id, value in token.top_logprobs)


def test_several_slots_from_one_prompt(subject: Subject) -> None:
    """Fan-out straight into the slots and through scratch; each choice is then on its own."""
    for length in (9, 37):
        together = Request(random_prompt(length, seed=2), slots=(3, 0, 1), sampling=OBSERVED)
        alone = Request(together.prompt, slots=(2,), sampling=OBSERVED)
        subject.driver.run(together, num_tokens=14)
        subject.driver.run(alone, num_tokens=14)
        for output in together.outputs:
            assert [token.token_id for token in output] == alone.tokens
            _assert_close(output, alone.outputs[0])


def test_slot_reuse_after_a_longer_request(subject: Subject) -> None:
    """The next sequence of a slot does not see the last one's ring and kept tokens."""
    for length in (1, 13, 18):
        request = Request(random_prompt(length, seed=3), slots=(1,), sampling=OBSERVED)
        subject.driver.run(request, num_tokens=12)
        subject.driver.run(Request(random_prompt(45, seed=3), slots=(1,), scratch=1), num_tokens=NUM_STEPS)
        again = Request(request.prompt, slots=(1,), sampling=OBSERVED)
        subject.driver.run(again, num_tokens=12)
        assert again.tokens == request.tokens
        _assert_close(again.outputs[0], request.outputs[0])


def test_scoring_does_not_change_slots(subject: Subject) -> None:
    driver = subject.driver
    request, alone = (Request(random_prompt(20, seed=4), sampling=OBSERVED) for _ in range(2))
    driver.run(alone, num_tokens=12)
    driver.read(request)
    driver.decode(request, num_steps=4)
    for length in (1, 9, 40):
        scored = Request(random_prompt(length, seed=4), slots=(), scratch=1, num_prompt_logprobs=NUM_TOP)
        driver.read(scored)
        expected = continue_greedily(subject.oracle, scored.prompt, 1)
        assert_same_logprobs(scored.prompt_logprobs, expected.prompt_logits, NUM_TOP)
    driver.decode(request, num_steps=7)
    assert request.tokens == alone.tokens
    _assert_close(request.outputs[0], alone.outputs[0])


def _assert_close(output: list[SampledToken], expected: list[SampledToken]) -> None:
    for token, other in zip(output, expected, strict=True):
        assert token.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        values, others = ([value for _, value in each.top_logprobs] for each in (token, other))
        assert values == pytest.approx(others, abs=TOLERANCE)


@pytest.mark.parametrize("steps_a_launch", [1, 5])
def test_nan_in_spare_entries_and_idle_slots_changes_nothing(subject: Subject, steps_a_launch: int) -> None:
    """Prompts of different lengths leave padding. Slots 1 and 3 are idle all the time, slot 0 at the end."""

    def outputs(poison: Callable[[], None]) -> list[list[SampledToken]]:
        requests = [
            Request(random_prompt(n, seed=5), slots=(slot,), sampling=OBSERVED, scratch=slot // 2)
            for slot, n in ((0, 8), (2, 38))
        ]
        while unread := [request for request in requests if not request.is_read]:
            poison()
            subject.driver.read_chunk(*unread)
        for live in (requests, requests[1:]):
            for _ in range(2):
                poison()
                subject.driver.decode(*live, num_steps=5, steps_a_launch=steps_a_launch)
        return [request.outputs[0] for request in requests]

    expected = outputs(lambda: None)
    for layer in subject.backend.pools[0].cache.layers:
        for plane in (*layer.slots.contents, *layer.scratch.planes):
            plane.fill_(_worst(plane))  # as if the last tenants' numbers had overflowed
    for slot in range(4):
        subject.backend.pools[0].will_write(slot, ALL_ENTRIES)
    assert outputs(lambda: _poison(subject.backend, idle_slots=[1, 3])) == expected


def _poison(backend: TorchBackend, idle_slots: list[int]) -> None:
    for slot in idle_slots:
        backend.pools[0].will_write(slot, ALL_ENTRIES)
    for layer in backend.pools[0].cache.layers:
        for cache in (layer.slots, layer.scratch):
            for plane in cache.planes:
                plane[:, :, cache.spare_entry] = math.nan
        for plane in layer.slots.contents:
            plane[idle_slots] = _worst(plane)
        if layer.slots.store is not None:
            slots = torch.arange(layer.slots.num_slots)
            spare_entries = torch.full_like(slots, layer.slots.store.spare_entry)
            rows = [torch.full_like(plane[:, :, 0], math.nan) for plane in layer.slots.planes]
            layer.slots.store.write(slots, spare_entries, *rows)


def _worst(plane: torch.Tensor) -> float:
    return math.nan if plane.is_floating_point() else 255


CHANCE = SamplingParams(
    temperature=1.3,
    top_p=0.9,
    top_k=80,
    min_p=0.001,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((17, 2.0), (40, -3.0)),
    seed=1234,
)


def test_seeded_output_knows_no_neighbours(subject: Subject) -> None:
    """The same seed alone, beside other seeds, in other slots and launches, and with separate choices."""
    driver = subject.driver
    prompt = random_prompt(25, seed=6)
    alone = Request(prompt, slots=(0,), sampling=CHANCE)
    driver.run(alone, num_tokens=NUM_STEPS)

    neighbours = [
        Request(random_prompt(n, seed=7), slots=(slot,), sampling=replace(CHANCE, seed=n))
        for slot, n in ((0, 5), (3, 9))
    ]
    crowded = Request(prompt, slots=(2,), sampling=CHANCE, scratch=1)
    driver.read(neighbours[0])
    driver.read(crowded, neighbours[1])
    driver.decode(neighbours[1], crowded, neighbours[0], num_steps=7, steps_a_launch=7)
    driver.decode(crowded, neighbours[0], num_steps=7)
    driver.decode(crowded, num_steps=7)
    assert crowded.tokens == alone.tokens

    choices = Request(prompt, slots=(1, 0), sampling=CHANCE)
    driver.run(choices, num_tokens=NUM_STEPS)
    queued = Request(prompt, slots=(3,), sampling=CHANCE, first_choice=1)
    driver.run(queued, num_tokens=NUM_STEPS)
    assert choices.tokens == alone.tokens
    assert [token.token_id for token in choices.outputs[1]] == queued.tokens != alone.tokens


@pytest.mark.parametrize(
    ("length", "num_tokens"), [(1, 1), (9, 1), (5, 6), (9, 31), (12, 6), (16, 51), (38, 6), (38, 51)]
)
def test_a_new_prompt_finds_the_rest_of_its_slot_empty(
    subject: Subject, length: int, num_tokens: int
) -> None:
    """Only what the last tenant wrote is cleared: of the prompt, of decode steps, of several choices."""
    tenant = Request(random_prompt(length, seed=4), slots=(0, 2), sampling=CHANCE)
    subject.driver.run(tenant, num_tokens=num_tokens, steps_a_launch=5)
    for slot in tenant.slots:
        subject.driver.read(Request(random_prompt(2), slots=(slot,)))
        for layer in subject.backend.pools[0].cache.layers:
            for plane in layer.slots.planes:
                assert plane[slot, :, 2 : layer.slots.spare_entry].count_nonzero() == 0
                assert plane[slot, :, :2].count_nonzero() > 0


def test_another_seed_is_another_output(subject: Subject) -> None:
    requests = [
        Request(random_prompt(25, seed=6), slots=(slot,), sampling=replace(CHANCE, seed=slot))
        for slot in range(4)
    ]
    subject.driver.read(*requests[:2])
    subject.driver.read(*requests[2:])
    subject.driver.decode(*requests, num_steps=11)
    assert len({tuple(request.tokens) for request in requests}) == 4


def test_penalties_forget_the_slots_last_tenant(subject: Subject) -> None:
    """What an earlier prompt and output held, or its bias, weighs on nothing in the same slot."""
    request, again = (
        Request(random_prompt(9, seed=8), slots=(2,), sampling=replace(CHANCE, temperature=0.0))
        for _ in range(2)
    )
    subject.driver.run(request, num_tokens=12)
    unwanted = request.tokens[3]
    tenant = Request(
        list(range(3, 50)),
        slots=(2,),
        sampling=replace(CHANCE, logit_bias=((unwanted, -100.0), (unwanted + 1, 100.0))),
    )
    subject.driver.run(tenant, num_tokens=NUM_STEPS)
    assert set(tenant.tokens) == {unwanted + 1}
    subject.driver.run(again, num_tokens=12)
    assert again.tokens == request.tokens

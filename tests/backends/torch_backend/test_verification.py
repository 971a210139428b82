"""Steps that read drafts give the tokens of steps without, for right and wrong drafts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from backends.interface import DecodeBatch, DecodeRow, Draw, SamplingParams, SlotPoolSpec
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import Quantization
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.oracle import random_prompt

FULL = PolicyOptions(PolicyName.FULL)
# Its ring is full after half of the answer.
SNAPSTREAM = PolicyOptions(num_sink=4, num_recent=48, num_kept=24, scorer=WindowScorer(observation_window=8))
NUM_TOKENS = 40
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=7),
]


class _Sequence:
    """One sequence that is decoded with drafts made of its known answer."""

    def __init__(self, request: Request, answer: Sequence[int], rng: random.Random) -> None:
        self.request = request
        self.answer = answer
        self.rng = rng
        self.tokens = request.tokens[:1]

    def row(self, pool: SlotPoolSpec) -> DecodeRow:
        num_drawn = len(self.tokens)
        num_prompt = len(self.request.prompt)
        room = pool.draft_room(num_prompt, num_prompt + num_drawn - 1)
        draft = list(self.answer[num_drawn : num_drawn + min(self.rng.randrange(4), max(room - 1, 0))])
        if draft and self.rng.random() < 0.6:
            draft[self.rng.randrange(len(draft))] = self.rng.randrange(320)
        return DecodeRow(
            "a",
            self.request.slots[0],
            self.tokens[-1],
            num_prompt + num_drawn - 1,
            num_prompt,
            Draw(self.request.sampling, output_index=num_drawn),
            tuple(draft),
        )


def _check(backend: TorchBackend, prompts: Sequence[list[int]], sampling: SamplingParams, chunk: int) -> None:
    """Decode in slots 0 and 2 first plainly, then with drafts, right and wrong."""
    plain = [
        Request(prompt, slots=(slot,), sampling=sampling)
        for prompt, slot in zip(prompts, (0, 2), strict=False)
    ]
    Driver(backend, chunk).run(*plain, num_tokens=NUM_TOKENS)
    again = [replace(request, num_read=0) for request in plain]
    Driver(backend, chunk).read(*again)
    rng = random.Random(3)
    sequences = [_Sequence(request, known.tokens, rng) for request, known in zip(again, plain, strict=True)]
    num_steps = 0
    while open_sequences := [each for each in sequences if len(each.tokens) < NUM_TOKENS]:
        batch = DecodeBatch(tuple(each.row(backend.spec.pools[0]) for each in open_sequences))
        result = backend.submit(batch).result()
        for sequence, tokens in zip(open_sequences, result.tokens, strict=True):
            sequence.tokens += [token.token_id for token in tokens]
        num_steps += 1
    for sequence in sequences:
        assert sequence.tokens[:NUM_TOKENS] == sequence.answer[:NUM_TOKENS]
    assert num_steps < NUM_TOKENS - 5, "drafts were accepted"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "random", "filtered"])
@pytest.mark.parametrize(
    ("architecture", "policy"),
    [("llama", FULL), ("llama", SNAPSTREAM), ("deepseek-v3", FULL)],
)
def test_drafts_change_no_token(
    tmp_path: Path, architecture: str, policy: PolicyOptions, sampling: SamplingParams
) -> None:
    backend = open_backend(save_checkpoint(architecture, tmp_path), policy, 256)
    assert backend.spec.pools[0].max_draft_tokens == 7
    _check(backend, [random_prompt(30), random_prompt(21, seed=1)], sampling, 32)


def test_a_rejected_draft_leaves_nothing_for_the_next_prompt(tmp_path: Path) -> None:
    backend = open_backend(save_checkpoint("llama", tmp_path), FULL, 256)
    driver = Driver(backend, 32)
    request = Request(random_prompt(30))
    driver.read(request)
    row = DecodeRow("a", 0, request.tokens[0], 30, 30, Draw(request.sampling, output_index=1), (1, 2, 3))
    assert len(backend.submit(DecodeBatch((row,))).result().tokens[0]) == 1
    driver.read(Request(random_prompt(2)))
    for layer in backend.pools[0].cache.layers:
        for plane in layer.slots.planes:
            assert plane[0, :, 2 : layer.slots.spare_entry].count_nonzero() == 0


def test_drafts_after_a_prompt_that_was_packed(tmp_path: Path) -> None:
    """Its window leaves most of the ring free."""
    policy = PolicyOptions(
        PolicyName.SNAPKV, num_recent=64, num_kept=24, scorer=WindowScorer(observation_window=8)
    )
    backend = open_backend(save_checkpoint("llama", tmp_path), policy, 256)
    _check(backend, [random_prompt(150), random_prompt(120, seed=1)], SAMPLINGS[1], 32)


@pytest.mark.long
def test_drafts_change_no_token_of_compiled_steps(tmp_path: Path, compile_cache: Path) -> None:
    backend = open_backend(
        save_checkpoint("llama", tmp_path),
        SNAPSTREAM,
        256,
        compile_cache=compile_cache,
        quantization=Quantization.INT8,
    )
    assert backend.compiled is not None
    assert backend.compiled.steps[0].are_used
    for sampling in SAMPLINGS:
        _check(backend, [random_prompt(30), random_prompt(21, seed=1)], sampling, 32)
    backend.close()

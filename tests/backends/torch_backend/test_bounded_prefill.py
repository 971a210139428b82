"""Prompts longer than their scratch: evictions and slots equal those of the plain reference."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.forward.step import LayerKind
from backends.torch_backend.spec import scratch_layout
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_SCORERS, PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from cache.scratch import ScratchLayout
from tests.backends.checkpoints import save_checkpoint
from tests.backends.contents import assert_same_contents, recipe_of
from tests.backends.driver import GREEDY, Driver, Request
from tests.backends.oracle import assert_same_logprobs, random_prompt
from tests.reference.bounded import Bound, BoundedSequence
from tests.reference.sequence import Sequence, load_reference

CAPACITY, MAX_MODEL_LEN, CHUNK, NUM_TOP = 40, 256, 8, 20
OBSERVED = replace(GREEDY, num_logprobs=NUM_TOP)
SIZES = PolicyOptions(
    PolicyName.SNAPSTREAM, num_sink=2, num_recent=8, num_kept=5, scorer=WindowScorer(4, pooling_size=3)
)
POLICIES = {
    "snapstream": SIZES,
    "default scorer": replace(
        SIZES, scorer=replace(DEFAULT_SCORERS[PolicyName.SNAPSTREAM], observation_window=5, num_echoed=0)
    ),
    "default scorer, with an echo": replace(
        SIZES, scorer=replace(DEFAULT_SCORERS[PolicyName.SNAPSTREAM], observation_window=5, num_echoed=3)
    ),
    "chunks": replace(SIZES, scorer=WindowScorer(4, pooling_size=3, selection_chunk=3)),
    "streaming-llm": PolicyOptions(PolicyName.STREAMING_LLM, num_sink=2, num_recent=11),
    "snapkv": PolicyOptions(
        PolicyName.SNAPKV, num_recent=14, num_kept=5, scorer=WindowScorer(3, pooling_size=3)
    ),
}
# With rounds of 20 tokens: one that fits just, one too many, just a round more, one above that, and many
# rounds.
LENGTHS = (40, 41, 60, 61, 183)


@dataclass(frozen=True)
class Subject:
    backend: TorchBackend
    reference: PreTrainedModel

    def start(self, request: Request) -> Sequence:
        layout, recipe = self.backend.spec.scratch.layout, recipe_of(self.backend.spec.pools[0].policy)
        if len(request.prompt) <= layout.max_tokens:
            return Sequence(self.reference, recipe, request.prompt)
        return BoundedSequence(
            self.reference,
            recipe,
            request.prompt,
            Bound(layout.max_tokens, layout.eviction_size, layout.num_ahead),
        )

    def check(self, request: Request, num_tokens: int) -> None:
        sequence = self.start(request)
        assert request.tokens == sequence.extend(num_tokens)
        assert_same_logprobs(request.outputs[0], sequence.logits, NUM_TOP)
        assert_same_contents(self.backend, request.slots[0], sequence, is_packed=True)


def _open(
    path: Path,
    *policies: PolicyOptions,
    scratch_capacity: int | None = CAPACITY,
    max_model_len: int = MAX_MODEL_LEN,
) -> TorchBackend:
    config = TorchBackendConfig(
        str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=tuple(
            PoolOptions(len(LENGTHS), policy, f"pool{number}") for number, policy in enumerate(policies)
        ),
        max_model_len=max_model_len,
        scratch_capacity=scratch_capacity,
        prefill_chunk=4 * CHUNK,
    )
    return TorchBackend(config)


def _subject(architecture: str, policy: PolicyOptions, folder: pytest.TempPathFactory) -> Subject:
    path = save_checkpoint(architecture, folder.mktemp("checkpoint"))
    return Subject(_open(path, policy), load_reference(path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = _subject("llama", SIZES, tmp_path_factory)
    yield subject
    subject.backend.close()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_tokens_and_slots_are_the_references(
    policy: PolicyOptions, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All lengths at once, two prompts at a time side by side in the scratches."""
    subject = _subject("llama", policy, tmp_path_factory)
    driver = Driver(subject.backend, CHUNK)
    requests = [
        Request(random_prompt(n), slots=(slot,), sampling=OBSERVED, scratch=slot % 2)
        for slot, n in enumerate(LENGTHS)
    ]
    for first in range(0, len(requests), 2):
        driver.read(*requests[first : first + 2])
    driver.decode(*requests, num_steps=10)
    for request in requests:
        subject.check(request, 11)
    subject.backend.close()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_least_scratch(policy: PolicyOptions, tmp_path: Path) -> None:
    """A scratch of which, each time, next to nothing but what stays anyway is left."""
    path = save_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match="scratch_capacity must be at least") as error:
        _open(path, policy, scratch_capacity=2)
    least = int(str(error.value).split()[5])
    subject = Subject(_open(path, policy, scratch_capacity=least), load_reference(path))
    driver = Driver(subject.backend, CHUNK)
    for excess in (0, 1, 3, 4, 10, 35):
        request = Request(random_prompt(least + excess), sampling=OBSERVED)
        driver.run(request, num_tokens=3)
        subject.check(request, 3)
    subject.backend.close()


@pytest.mark.parametrize("architecture", ["gemma3", "deepseek-v3"])
def test_layers_with_a_sliding_window_or_latents(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = _subject(architecture, SIZES, tmp_path_factory)
    request = Request(random_prompt(83), sampling=OBSERVED)
    Driver(subject.backend, CHUNK).run(request, num_tokens=8)
    subject.check(request, 8)
    subject.backend.close()


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_change_nothing(llama: Subject, chunk: int) -> None:
    request = Request(random_prompt(87, seed=1), sampling=OBSERVED)
    Driver(llama.backend, chunk).run(request, num_tokens=6)
    llama.check(request, 6)


def test_a_prompt_that_fits_is_read_as_if_there_were_no_bound(llama: Subject, tmp_path: Path) -> None:
    exact = _open(save_checkpoint("llama", tmp_path), SIZES, scratch_capacity=None)
    bounded, free = (Request(random_prompt(CAPACITY, seed=2), sampling=OBSERVED) for _ in range(2))
    Driver(llama.backend, CHUNK).run(bounded, num_tokens=12)
    Driver(exact, CHUNK).run(free, num_tokens=12)
    assert bounded.outputs == free.outputs
    exact.close()


def test_a_scratch_forgets_its_last_prompt(llama: Subject) -> None:
    """Read between others, some aborted halfway, beside another or alone: to the last bit the same."""
    driver = Driver(llama.backend, CHUNK)
    alone = Request(random_prompt(77, seed=3), sampling=OBSERVED)
    driver.run(alone, num_tokens=6)
    for num_chunks in (5, 6, 9):
        abandoned = Request(random_prompt(120, seed=4))
        for _ in range(num_chunks):
            driver.read_chunk(abandoned)
        again, beside = (
            Request(alone.prompt, sampling=OBSERVED),
            Request(random_prompt(95, seed=5), slots=(1,), scratch=1),
        )
        driver.run(again, beside, num_tokens=6)
        assert again.tokens == alone.tokens
        llama.check(again, 6)


def test_nan_in_spare_entries_changes_nothing(llama: Subject) -> None:
    request, again = (Request(random_prompt(66, seed=6), sampling=OBSERVED) for _ in range(2))
    driver = Driver(llama.backend, CHUNK)
    driver.run(request, num_tokens=4)
    for layer in llama.backend.pools[0].cache.layers:
        for plane in layer.scratch.planes:
            plane.fill_(torch.nan)  # cleared where the next prompt begins, but for the spare entry
    while not again.is_read:
        driver.read_chunk(again)
        for layer in llama.backend.pools[0].cache.layers:
            for plane in layer.scratch.planes:
                plane[:, :, layer.scratch.spare_entry] = torch.nan
    driver.decode(again, num_steps=3)
    assert again.outputs == request.outputs


def test_prompts_that_are_only_scored(llama: Subject) -> None:
    request = Request(random_prompt(73, seed=7), slots=(), num_prompt_logprobs=NUM_TOP)
    Driver(llama.backend, CHUNK).read(request)
    assert_same_logprobs(request.prompt_logprobs, llama.start(request).prompt_logits[:-1], NUM_TOP)


def test_the_scratch_does_not_grow_with_the_longest_prompt(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path)
    sizes = []
    for max_model_len in (64, 256):
        backend = _open(path, SIZES, max_model_len=max_model_len)
        sizes.append(backend.pools[0].cache.num_bytes)
        backend.close()
    assert sizes[0] == sizes[1]


def test_pools_share_the_scratches(llama: Subject, tmp_path: Path) -> None:
    """A smaller pool's prompt leaves nothing for a larger one's. The scratch is wide enough for both."""
    backend = _open(save_checkpoint("llama", tmp_path), SIZES, replace(SIZES, num_recent=6, num_kept=3))
    assert backend.spec.scratch == llama.backend.spec.scratch
    alone, again = (Request(random_prompt(90, seed=8), sampling=OBSERVED) for _ in range(2))
    Driver(llama.backend, CHUNK).run(alone, num_tokens=6)
    Driver(backend, CHUNK, pool=1).run(Request(random_prompt(99, seed=9)), num_tokens=2)
    Driver(backend, CHUNK).run(again, num_tokens=6)
    assert again.outputs == alone.outputs
    backend.close()


@pytest.mark.parametrize(
    ("capacity", "chunk", "num_dropped"),
    [
        (40, 32, 20),  # half
        (40, 8, 16),  # of whole chunks
        (19, 3, 9),
    ],
)
def test_half_of_a_scratch_is_evicted_in_whole_chunks(capacity: int, chunk: int, num_dropped: int) -> None:
    kinds = [LayerKind(SIZES.resolve(MAX_MODEL_LEN), None)]
    assert scratch_layout(capacity, MAX_MODEL_LEN, chunk, kinds) == ScratchLayout(
        capacity, num_dropped, num_ahead=4
    )


@pytest.mark.parametrize(
    ("policy", "capacity", "message"),
    [
        (PolicyOptions(PolicyName.FULL), 40, "scratch_capacity is not an option of policy full"),
        (SIZES, 18, "scratch_capacity must be at least 19 for slots of 15 entries, got 18"),
        (
            replace(SIZES, num_kept=0, num_recent=4),
            6,
            "scratch_capacity must be at least 7 for slots of 6 entries, got 6",
        ),
    ],
)
def test_sizes_that_do_not_go_together(
    policy: PolicyOptions, capacity: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        _open(save_checkpoint("llama", tmp_path), policy, scratch_capacity=capacity)

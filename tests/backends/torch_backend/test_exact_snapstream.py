"""Policy snapstream equals the plain reference: tokens, log-probabilities and slot contents."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from backends.torch_backend.backend import TorchBackend
from cache.policy import PolicyName
from cache.policy_options import DEFAULT_SCORERS, PolicyOptions
from cache.scorer import HeadReduction, Pooling, QueryReduction, SoftmaxDomain, WindowScorer
from tests.backends.checkpoints import HYBRIDS, save_checkpoint
from tests.backends.contents import assert_same_contents, recipe_of
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.kernels import compile_cache_beside
from tests.backends.oracle import assert_same_logprobs, random_prompt
from tests.reference.sequence import Sequence, load_reference

CHUNK = 6
S, R, K = 2, 8, 5
NUM_TOP = 20
OBSERVED = replace(GREEDY, num_logprobs=NUM_TOP)
POLICY = PolicyOptions(
    PolicyName.SNAPSTREAM,
    num_sink=S,
    num_recent=R,
    num_kept=K,
    scorer=WindowScorer(observation_window=4, pooling_size=3),
)
# Around the sinks, the window, the kept entries and the chunks; 20 and 26 have an observation window on both
# sides of a chunk's border.
LENGTHS = (1, 2, 3, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 26, 41)
FEWER_LENGTHS = (2, 10, 11, 15, 16, 20, 41)
# Four query heads on two KV heads, on one and on four, compressed layers beside sliding windows of 11 tokens,
# Gemma 2's with a softcap, and latents, of which short chunks and decode read what is held and longer chunks
# make keys and values. Compressed layers between those with states.
ARCHITECTURES = ("llama", "qwen2", "phi3", "gemma3", "gemma2", "deepseek-v2", "deepseek-v3", "lfm2")


@dataclass(frozen=True)
class Subject:
    """A backend and the reference of the same checkpoint and policy."""

    backend: TorchBackend
    reference: PreTrainedModel

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS if isinstance(self.reference, LlamaForCausalLM) else FEWER_LENGTHS

    def start(self, request: Request) -> Sequence:
        return Sequence(self.reference, recipe_of(self.backend.spec.pools[0].policy), request.prompt)

    def check(self, request: Request, sequence: Sequence) -> None:
        """The request and its slot are what the reference says, both drawn to the same length."""
        where = f"prompt of {len(request.prompt)}"
        assert request.tokens == sequence.tokens, where
        assert_same_logprobs(request.outputs[0], sequence.logits, NUM_TOP)
        is_packed = len(request.prompt) > self.backend.spec.pools[0].max_direct_tokens
        assert_same_contents(self.backend, request.slots[0], sequence, is_packed=is_packed)


def _open(
    architecture: str,
    folder: pytest.TempPathFactory,
    policy: PolicyOptions,
    num_slots: int = 2,
    max_model_len: int = 96,
    compile_cache: Path | None = None,
) -> Subject:
    path = save_checkpoint(architecture, folder.mktemp("checkpoint"))
    return Subject(
        open_backend(path, policy, max_model_len, num_slots, compile_cache=compile_cache),
        load_reference(path),
    )


@pytest.fixture(
    scope="module",
    params=[
        *itertools.product(ARCHITECTURES, (False, True)),
        *(pytest.param((name, False), marks=pytest.mark.long) for name in HYBRIDS),
        ("llama", "compiled"),
        pytest.param(("gemma2", "compiled"), marks=pytest.mark.long),
    ],
    ids=str,
)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: Path
) -> Iterator[Subject]:
    architecture, variant = request.param
    cache = compile_cache if variant == "compiled" else None
    if cache is not None and architecture != "llama":
        cache = compile_cache_beside(cache, architecture)
    policy = replace(POLICY, lend_kept=variant is not False, lend_ring=variant is not False)
    subject = _open(architecture, tmp_path_factory, policy, num_slots=len(LENGTHS), compile_cache=cache)
    yield subject
    subject.backend.close()


def test_every_boundary_in_one_batch(subject: Subject) -> None:
    """All lengths at once: each slot is compared after prefill, and after its ring was overwritten twice."""
    driver = Driver(subject.backend, CHUNK)
    requests = [
        Request(random_prompt(n), slots=(slot,), sampling=OBSERVED) for slot, n in enumerate(subject.lengths)
    ]
    sequences = [subject.start(request) for request in requests]
    for request, sequence in zip(requests, sequences, strict=True):
        driver.read(request)
        sequence.extend(1)
        subject.check(request, sequence)

    num_steps = 2 * (R + K) + 3
    driver.decode(*requests, num_steps=num_steps)
    for request, sequence in zip(requests, sequences, strict=True):
        sequence.extend(num_steps)
        subject.check(request, sequence)


@pytest.mark.parametrize("lend_kept", [False, True])
@pytest.mark.parametrize("reduction", HeadReduction)
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("domain", SoftmaxDomain)
def test_scorer_options(
    domain: SoftmaxDomain,
    pooling: Pooling,
    reduction: HeadReduction,
    lend_kept: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Two prompts read side by side and decoded together, with one option of each kind."""
    scorer = WindowScorer(4, softmax_domain=domain, pooling=pooling, pooling_size=3, head_reduction=reduction)
    _check_pair("llama", replace(POLICY, scorer=scorer, lend_kept=lend_kept), (20, 41), tmp_path_factory)


@pytest.mark.parametrize("observation_window", [1, 3, R])
@pytest.mark.parametrize("pooling_size", [1, 5, 9])
def test_scorer_sizes(
    observation_window: int, pooling_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a single query to a whole window, over several chunks, and with a wide pooling window."""
    scorer = WindowScorer(observation_window, pooling_size=pooling_size)
    _check_pair("qwen3", replace(POLICY, scorer=scorer), (16, 38), tmp_path_factory)


@pytest.mark.parametrize("selection_chunk", [2, 3, 40])
@pytest.mark.parametrize("reduction", QueryReduction)
def test_selection_options(
    reduction: QueryReduction, selection_chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chunks of which several are kept, the last in part, one that has all candidates, and long windows."""
    scorer = WindowScorer(
        4, pooling_size=3, pooling_shift=1, query_reduction=reduction, selection_chunk=selection_chunk
    )
    _check_pair("qwen3", replace(POLICY, scorer=scorer), (20, 41), tmp_path_factory)


@pytest.mark.parametrize("lend_ring", [False, True])
def test_a_window_wider_than_the_ring_votes_on_its_own_tokens(
    lend_ring: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scorer = replace(DEFAULT_SCORERS[PolicyName.SNAPSTREAM], observation_window=70, num_echoed=5)
    policy = replace(POLICY, num_recent=44, num_kept=12, scorer=scorer, lend_ring=lend_ring)
    _check_pair("llama", policy, (90, 131), tmp_path_factory, chunk=32, max_model_len=256)


@pytest.mark.parametrize("num_echoed", [0, 3, 16])
def test_the_default_scorer(num_echoed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    scorer = replace(DEFAULT_SCORERS[PolicyName.SNAPSTREAM], observation_window=4, num_echoed=num_echoed)
    _check_pair("llama", replace(POLICY, scorer=scorer), (20, 61), tmp_path_factory)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (1, 1, 2), (3, 5, 0), (0, 13, 12)])
def test_slot_sizes(sizes: tuple[int, int, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """No sinks, a ring of one entry, nothing kept, and a window longer than a chunk."""
    num_sink, num_recent, num_kept = sizes
    scorer = WindowScorer(observation_window=min(4, num_recent), pooling_size=3)
    policy = PolicyOptions(
        PolicyName.SNAPSTREAM, num_sink=num_sink, num_recent=num_recent, num_kept=num_kept, scorer=scorer
    )
    _check_pair("mistral", policy, (13, 33), tmp_path_factory)


@pytest.mark.parametrize("architecture", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 32])
def test_chunks_change_nothing(
    chunk: int, architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Token by token, with borders inside the observation window, and nearly in one piece."""
    _check_pair(architecture, POLICY, (20, 37), tmp_path_factory, chunk)


def test_a_prompt_after_an_aborted_one_is_exact(subject: Subject) -> None:
    """The votes and tokens of an unfinished prompt, left behind in slot and scratch, count for nothing."""
    driver = Driver(subject.backend, CHUNK)
    abandoned, request = (
        Request(random_prompt(26, seed=2)),
        Request(random_prompt(25, seed=3), sampling=OBSERVED),
    )
    for _ in range(4):
        driver.read_chunk(abandoned)
    assert abandoned.num_read == 24 > len(abandoned.prompt) - 4  # half of its observation window has voted
    driver.run(request, num_tokens=4)
    sequence = subject.start(request)
    sequence.extend(4)
    subject.check(request, sequence)


def test_long_prompts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slots and scratches that are read in part: prompts that fit exactly, with room, and not at all."""
    policy = replace(POLICY, num_sink=4, num_recent=60, num_kept=250)
    _check_pair("llama", policy, (300, 330), tmp_path_factory, chunk=32, max_model_len=512)
    _check_pair("llama", policy, (60, 257), tmp_path_factory, chunk=32, max_model_len=512)


def _check_pair(
    architecture: str,
    policy: PolicyOptions,
    lengths: tuple[int, int],
    folder: pytest.TempPathFactory,
    chunk: int = CHUNK,
    max_model_len: int = 96,
) -> None:
    subject = _open(architecture, folder, policy, max_model_len=max_model_len)
    driver = Driver(subject.backend, chunk)
    requests = [
        Request(random_prompt(n, seed=1), slots=(slot,), sampling=OBSERVED, scratch=slot)
        for slot, n in enumerate(lengths)
    ]
    driver.run(*requests, num_tokens=2 * R + 4)
    for request in requests:
        sequence = subject.start(request)
        sequence.extend(2 * R + 4)
        subject.check(request, sequence)
    subject.backend.close()

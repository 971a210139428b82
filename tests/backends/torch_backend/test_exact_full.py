"""Policy full equals transformers' `generate`, with log-probabilities within 1e-4, in every batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from backends.interface import Backend
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.checkpoints import (
    ARCHITECTURES,
    HYBRIDS,
    INDEXED,
    SLIDING_WINDOW,
    load_oracle,
    save_checkpoint,
)
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.kernels import compile_cache_beside
from tests.backends.oracle import Continuation, assert_same_logprobs, continue_greedily, random_prompt

CHUNK = 8
NUM_SLOTS = 4
NUM_TOP = 20
MAX_MODEL_LEN = 64
# Architectures that are compiled, and what differs from their usual checkpoints. Biases, sliding windows and
# a gated product of whole blocks; states beside other layers' entries and in the same layer, whose output is
# in a tuple.
# Compiled, Llama and Gemma 2 are read in `test_exact_snapstream`. Each layer takes long to compile.
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
    "use_sliding_window": True,
    "intermediate_size": 128,
}
COMPILED: dict[str, dict[str, Any]] = {
    "qwen2": {**SLIDING, "num_hidden_layers": 2},
    "lfm2": {},
    "falcon-h1": {"num_hidden_layers": 2},
    "qwen3-next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
SLOW = tuple(pytest.param(name, marks=pytest.mark.long) for name in HYBRIDS)
SLOWEST = tuple(pytest.param(f"{name}-compiled", marks=pytest.mark.long) for name in COMPILED)
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 29)
OBSERVED = replace(GREEDY, num_logprobs=NUM_TOP)


@dataclass(frozen=True)
class Subject:
    """A backend and the transformers model of the same checkpoint."""

    backend: Backend
    oracle: PreTrainedModel

    def request(self, prompt: list[int], slot: int) -> Request:
        return Request(prompt, slots=(slot,), sampling=OBSERVED, scratch=slot % 2)

    def check(self, request: Request) -> None:
        expected = continue_greedily(self.oracle, request.prompt, len(request.tokens))
        assert request.tokens == expected.tokens
        assert_same_logprobs(request.outputs[0], expected.logits, NUM_TOP)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *INDEXED, *SLOW, *SLOWEST])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: Path
) -> Iterator[Subject]:
    architecture, is_compiled = request.param.removesuffix("-compiled"), request.param.endswith("-compiled")
    changes = COMPILED[architecture] if is_compiled else {}
    path = save_checkpoint(architecture, tmp_path_factory.mktemp("checkpoint"), **changes)
    cache = compile_cache_beside(compile_cache, architecture) if is_compiled else None
    backend = open_backend(
        path, PolicyOptions(PolicyName.FULL), max_model_len=MAX_MODEL_LEN, compile_cache=cache
    )
    backend.warmup()  # leaves nothing behind
    yield Subject(backend, load_oracle(path))
    backend.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(subject: Subject, length: int) -> None:
    request = subject.request(random_prompt(length), slot=length % NUM_SLOTS)
    Driver(subject.backend, CHUNK).run(request, num_tokens=13, steps_a_launch=1 + length % 2)
    subject.check(request)


def test_neighbours_join_and_leave(subject: Subject) -> None:
    """Prompts of all lengths. Each slot's second request is shorter than its first. Rows are in any order."""
    driver = Driver(subject.backend, CHUNK)
    long, single, short, whole = (
        subject.request(random_prompt(n, seed=1), slot) for slot, n in enumerate((29, 1, 9, 16))
    )
    driver.read(single)
    driver.decode(single, num_steps=3)
    driver.read_chunk(long, short)
    driver.decode(single, num_steps=2)
    driver.read(whole, long)
    driver.decode(long, single, whole)
    driver.read(short)
    driver.decode(whole, short, single, long, num_steps=5)

    after_long, after_whole = (
        subject.request(random_prompt(3, seed=2), long.slots[0]),
        subject.request(random_prompt(8, seed=2), whole.slots[0]),
    )
    driver.read_chunk(after_long, after_whole)
    driver.decode(short, after_whole, single, after_long, num_steps=8)
    driver.decode(after_long, num_steps=4)
    for request in (long, single, short, whole, after_long, after_whole):
        subject.check(request)


def test_longest_sequence(subject: Subject) -> None:
    """The last token is never written: a sequence can have one token more than its slot's entries."""
    request = subject.request(random_prompt(40, seed=3), slot=2)
    Driver(subject.backend, CHUNK).run(request, num_tokens=MAX_MODEL_LEN - 40)
    subject.check(request)


@pytest.mark.parametrize("length", [1, 8, 9, 29])
def test_prompt_logprobs_across_chunks(subject: Subject, length: int) -> None:
    request = Request(random_prompt(length, seed=4), sampling=OBSERVED, num_prompt_logprobs=NUM_TOP)
    scored = Request(random_prompt(length, seed=4), slots=(), num_prompt_logprobs=5)
    driver = Driver(subject.backend, CHUNK)
    driver.run(request, num_tokens=4)
    driver.read(scored)
    subject.check(request)
    expected = continue_greedily(subject.oracle, request.prompt, 4)
    _check_prompt(request, expected, NUM_TOP)
    _check_prompt(scored, expected, 5)


def test_long_prompts(tmp_path: Path) -> None:
    """Lengths from which more of a slot or a scratch is read, directly and with a sliding window."""
    for architecture in ("llama", "gemma3"):
        path = save_checkpoint(architecture, tmp_path)
        subject = Subject(
            open_backend(path, PolicyOptions(PolicyName.FULL), max_model_len=512), load_oracle(path)
        )
        requests = [
            subject.request(random_prompt(length, seed=5), slot)
            for slot, length in enumerate((250, 256, 257, 500))
        ]
        driver = Driver(subject.backend, chunk=32)
        for request in requests:
            driver.read(request)
        driver.decode(*requests, num_steps=11)
        for request in requests:
            subject.check(request)


def _check_prompt(request: Request, expected: Continuation, num_top: int) -> None:
    assert [token.token_id for token in request.prompt_logprobs] == request.prompt[1:]
    assert_same_logprobs(request.prompt_logprobs, expected.prompt_logits, num_top)

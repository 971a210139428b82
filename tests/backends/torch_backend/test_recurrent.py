"""Layers with states of fixed size: a sequence's own states, and those of no other.

That tokens, states and slots are those of transformers and of the reference is shown in `test_exact_*`, and
that a step's shapes are static in `test_cuda_graphs`.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.model import recurrent
from backends.torch_backend.model.recurrent import RecurrentMixer
from backends.torch_backend.pool import ALL_ENTRIES
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import HYBRIDS, save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.oracle import TOLERANCE, random_prompt

# The others need the same of slots, and more time.
ARCHITECTURES = ("lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in HYBRIDS))
MAX_MODEL_LEN = 96
FULL = PolicyOptions(PolicyName.FULL)
SMALL = PolicyOptions(
    num_sink=2,
    num_recent=8,
    num_kept=5,
    scorer=WindowScorer(observation_window=4, pooling_size=3, num_echoed=3),
)
OBSERVED = replace(GREEDY, num_logprobs=5)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=[FULL, SMALL], ids=["direct", "packed"])
def backend(path: Path, request: pytest.FixtureRequest) -> Iterator[TorchBackend]:
    backend = open_backend(path, request.param, MAX_MODEL_LEN)
    yield backend
    backend.close()


def test_no_draft_is_verified_since_no_state_can_be_taken_back(backend: TorchBackend) -> None:
    assert [pool.max_draft_tokens for pool in backend.spec.pools] == [0]


@pytest.mark.parametrize("chunk", [1, 7])
def test_convolutions_of_slow_types_give_the_same_tokens(
    path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replaced in types that the processor has no products in, here as if float32 were one."""
    found = []
    for is_fast in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(onednn, "multiplies", lambda _dtype, is_fast=is_fast: is_fast)
            backend = open_backend(path, FULL, MAX_MODEL_LEN)
        mixer = next(each for each in backend._model.modules() if isinstance(each, RecurrentMixer))
        function = mixer._forward.__globals__["causal_conv1d_fn"]
        assert (function is recurrent._convolve) != is_fast
        request = request_of(30, 0)
        Driver(backend, chunk).run(request, num_tokens=9)
        found.append((request.tokens, states(backend, 0)))
        backend.close()
    assert found[0][0] == found[1][0]
    assert_close(found[1][1], found[0][1])


def request_of(length: int, slot: int, seed: int = 0) -> Request:
    return Request(random_prompt(length, seed), slots=(slot,), sampling=OBSERVED, scratch=slot % 2)


def states(backend: TorchBackend, slot: int) -> list[Tensor]:
    held = [state[slot] for layer in backend.pools[0].cache.layers for state in layer.slots.states]
    assert held
    return [state.clone() for state in held]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for state, other in zip(found, expected, strict=True):
        torch.testing.assert_close(state, other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 7, 32])
def test_chunks_carry_the_states(backend: TorchBackend, chunk: int) -> None:
    whole, parts = (request_of(30, slot) for slot in (0, 1))
    Driver(backend, 32).run(whole, num_tokens=6)
    Driver(backend, chunk).run(parts, num_tokens=6)
    assert parts.tokens == whole.tokens
    assert_close(states(backend, 1), states(backend, 0))


def test_rows_of_other_lengths_do_not_touch_a_state(backend: TorchBackend) -> None:
    """Chunks of several rows are padded before their tokens, and a shape has rows of padding alone."""
    driver = Driver(backend, 8)
    requests = [request_of(length, slot) for slot, length in enumerate((29, 12, 1))]
    driver.run(*requests, num_tokens=9)
    for request in requests:
        alone = request_of(len(request.prompt), 3)
        driver.run(alone, num_tokens=9)
        assert alone.tokens == request.tokens
        assert_close(states(backend, request.slots[0]), states(backend, 3))


def test_a_decode_step_leaves_the_states_of_other_slots(backend: TorchBackend) -> None:
    """Those of a prompt that is half read, and of a sequence that waits for its next step."""
    driver = Driver(backend, 8)
    reading, waiting, running = request_of(40, 0), request_of(9, 1), request_of(10, 2)
    driver.read(waiting, running)
    driver.decode(waiting, num_steps=2)
    driver.read_chunk(reading)
    before = states(backend, 0), states(backend, 1)
    driver.decode(running, num_steps=4, steps_a_launch=4)
    for slot in (0, 1):
        assert all(map(torch.equal, states(backend, slot), before[slot]))
    driver.read(reading)
    driver.decode(reading, waiting, running, num_steps=4)
    for request in (reading, waiting, running):
        alone = request_of(len(request.prompt), 3)
        driver.run(alone, num_tokens=len(request.tokens))
        assert alone.tokens == request.tokens


def test_states_of_nan_in_idle_rows_change_nothing(backend: TorchBackend) -> None:
    driver = Driver(backend, 8)
    plain, beside = request_of(30, 1), request_of(30, 1)
    driver.run(plain, num_tokens=9)
    for layer in backend.pools[0].cache.layers:
        for tensor in (*layer.slots.contents, *layer.scratch.states):
            tensor.fill_(torch.nan)
    for slot in range(backend.pools[0].spec.num_slots):
        backend.pools[0].will_write(slot, ALL_ENTRIES)
    driver.run(beside, num_tokens=9)
    assert beside.outputs == plain.outputs
    assert all(state.isfinite().all() for state in states(backend, 1))
    assert all(state.isnan().all() for state in states(backend, 0))
    for layer in backend.pools[0].cache.layers:
        for tensor in (*layer.slots.contents, *layer.scratch.states):
            tensor.zero_()


@pytest.mark.parametrize("is_half_read", [True, False])
def test_a_slot_is_reused_without_the_states_of_an_aborted_request(
    backend: TorchBackend, is_half_read: bool
) -> None:
    driver = Driver(backend, 8)
    fresh, aborted, late = request_of(20, 3), request_of(40, 0, seed=1), request_of(20, 0)
    driver.run(fresh, num_tokens=5)
    if is_half_read:
        driver.read_chunk(aborted)
        driver.read_chunk(aborted)
    else:
        driver.run(aborted, num_tokens=3)
    driver.run(late, num_tokens=5)
    assert late.tokens == fresh.tokens
    assert_close(states(backend, 0), states(backend, 3))


def test_choices_have_a_state_each(backend: TorchBackend) -> None:
    driver = Driver(backend, 8)
    sampling = replace(GREEDY, temperature=1.5, seed=3)
    choices = Request(random_prompt(30), slots=(2, 0), sampling=sampling)
    driver.run(choices, num_tokens=9)
    assert choices.outputs[0] != choices.outputs[1]
    for choice in (0, 1):
        alone = Request(random_prompt(30), slots=(1,), sampling=sampling, first_choice=choice)
        driver.run(alone, num_tokens=9)
        assert alone.outputs[0] == choices.outputs[choice]
        assert_close(states(backend, 1), states(backend, choices.slots[choice]))


def test_tokens_read_for_their_votes_leave_the_states(path: Path) -> None:
    """The echo of a question behind the prompt, and the tokens ahead of a scratch that evicts."""
    for scratch_capacity in (None, 40):
        config = TorchBackendConfig(
            str(path),
            device=DeviceName.CPU,
            dtype=DtypeName.FLOAT32,
            pools=(PoolOptions(1, SMALL), PoolOptions(1, FULL, name="whole"))
            if scratch_capacity is None
            else (PoolOptions(1, SMALL),),
            max_model_len=MAX_MODEL_LEN,
            scratch_capacity=scratch_capacity,
            prefill_chunk=8,
        )
        backend = TorchBackend(config)
        request = request_of(80, 0)
        Driver(backend, 8).read(request)
        whole = open_backend(path, FULL, MAX_MODEL_LEN)
        Driver(whole, 8).read(expected := request_of(80, 0))
        first = next(index for index, layer in enumerate(backend.pools[0].cache.layers) if layer.slots.states)
        held, others = (each.pools[0].cache.layers[first].slots.states for each in (backend, whole))
        assert_close([state[0] for state in held], [state[0] for state in others])
        if scratch_capacity is None:
            assert request.tokens == expected.tokens
            assert_close(states(backend, 0), states(whole, 0))


def test_policy_sparse_attends_beside_states(tmp_path: Path) -> None:
    path = save_checkpoint("lfm2", tmp_path)
    everything = PolicyOptions(PolicyName.SPARSE, num_sink=2, num_recent=14, num_attended=MAX_MODEL_LEN)
    found = []
    for policy in (everything, FULL):
        request = request_of(60, 0)
        driver = Driver(open_backend(path, policy, MAX_MODEL_LEN), 8)
        driver.run(request, num_tokens=9)
        found.append([token.logprob or 0.0 for token in request.outputs[0]])
    errors = [abs(own - exact) for own, exact in zip(*found, strict=True)]
    assert 0 < sum(errors) / len(errors) < 0.2, "stored tokens are rounded to 4 bits"


def test_prompts_are_not_stored(path: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = TorchBackendConfig(
        str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(1, FULL),),
        max_model_len=MAX_MODEL_LEN,
        prefix_cache_bytes=None,
    )
    with caplog.at_level(logging.INFO):
        backend = TorchBackend(config)
    assert backend.spec.prefixes is None
    assert re.search("prompts are not stored for later ones: .* has recurrent layers", caplog.text)
    for change in ({"prefix_cache_bytes": 1 << 20}, {"prefix_cache_dir": tmp_path}):
        with pytest.raises(ValueError, match=r"prefix_cache_bytes must be 0.*recurrent layers \(.+\)"):
            TorchBackend(replace(config, **change))


def test_a_slot_has_the_bytes_of_its_states(backend: TorchBackend) -> None:
    num_bytes = sum(state.nbytes for state in states(backend, 0))
    kept = sum(
        tensor[0].nbytes
        for layer in backend.pools[0].cache.layers
        for tensor in (*layer.slots.planes, layer.slots.kept_index)
    )
    assert backend.spec.pools[0].slot_bytes == num_bytes + kept

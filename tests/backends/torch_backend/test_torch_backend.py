"""The torch backend's limits, its failures, and what it leaves alone.

That its tokens are right is shown in `test_exact_*`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.clock import VirtualClock
from backends.interface import (
    BackendError,
    BackendUnusableError,
    Batch,
    DecodeBatch,
    DecodeRow,
    Draw,
    Feature,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    PromptScore,
)
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, TorchBackendConfig
from backends.torch_backend.pool import ALL_ENTRIES
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from cache.scorer import WindowScorer
from tests.backends.checkpoints import SLIDING_WINDOW, VOCAB_SIZE, save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request

SMALL_SNAPSTREAM = PolicyOptions(
    num_sink=2, num_recent=20, num_kept=10, scorer=WindowScorer(observation_window=4)
)
FULL = PolicyOptions(PolicyName.FULL)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def config(llama: Path) -> TorchBackendConfig:
    return TorchBackendConfig(
        str(llama),
        device=DeviceName.CPU,
        pools=(PoolOptions(3, SMALL_SNAPSTREAM),),
        prefill_chunk=32,
        max_model_len=128,
    )


@pytest.fixture(scope="module")
def shared(config: TorchBackendConfig) -> TorchBackend:
    backend = TorchBackend(config)
    backend.warmup()
    return backend


@pytest.fixture
def backend(shared: TorchBackend) -> Iterator[TorchBackend]:
    model = shared._model
    yield shared
    shared._model = model


def _prompt(length: int) -> list[int]:
    return [(7 * index + length) % VOCAB_SIZE for index in range(length)]


def test_spec(backend: TorchBackend, llama: Path) -> None:
    spec = backend.spec
    assert (spec.vocab_size, spec.max_model_len, spec.pools[0].num_slots) == (VOCAB_SIZE, 128, 3)
    assert (spec.pools[0].max_direct_tokens, spec.pools[0].policy.max_exact_prompt) == (22, 32)
    assert (spec.scratch.num_scratch, spec.scratch.layout.max_tokens) == (2, 128)
    assert spec.features == frozenset(Feature)
    assert not spec.simulated
    by_default = TorchBackend(
        TorchBackendConfig(str(llama), device=DeviceName.CPU, pools=(PoolOptions(1, FULL),))
    ).spec
    assert by_default.max_model_len == 512  # the model's own
    assert by_default.prefill_shapes == (
        PrefillShape(1, 32),
        PrefillShape(8, 32),
        PrefillShape(1, 64),
        PrefillShape(1, 128),
        PrefillShape(4, 128),
        PrefillShape(1, 256),
        PrefillShape(1, 512),
    )


def test_a_sliding_window_limits_what_is_read_directly(tmp_path: Path) -> None:
    path = save_checkpoint("gemma3", tmp_path)
    config = TorchBackendConfig(
        str(path), device=DeviceName.CPU, pools=(PoolOptions(1, SMALL_SNAPSTREAM),), max_model_len=128
    )
    backend = TorchBackend(config)
    assert backend.spec.pools[0].max_direct_tokens == SLIDING_WINDOW
    assert [layer.slots.layout.capacity for layer in backend.pools[0].cache.layers] == [
        SLIDING_WINDOW,
        32,
        SLIDING_WINDOW,
    ]
    never_outgrown = TorchBackend(
        replace(config, max_model_len=SLIDING_WINDOW, pools=(PoolOptions(1, FULL),))
    )
    assert [layer.kind.sliding_window for layer in never_outgrown.pools[0].cache.layers] == [None] * 3


def test_limits_of_the_model_are_respected(config: TorchBackendConfig) -> None:
    with pytest.raises(ValueError, match=r"513 .*512"):
        TorchBackend(replace(config, max_model_len=513))


@pytest.mark.parametrize("name", ["num_scratch", "prefill_chunk", "max_model_len"])
def test_sizes_are_positive(config: TorchBackendConfig, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(config, **{name: 0})  # type: ignore[arg-type]


def test_memory_does_not_depend_on_what_was_read(backend: TorchBackend) -> None:
    before = backend.pools[0].cache.num_bytes
    planes = [plane.data_ptr() for layer in backend.pools[0].cache.layers for plane in layer.slots.planes]
    Driver(backend, 32).run(Request(_prompt(100)), Request(_prompt(60), slots=(1,), scratch=1), num_tokens=3)
    assert backend.pools[0].cache.num_bytes == before
    assert [
        plane.data_ptr() for layer in backend.pools[0].cache.layers for plane in layer.slots.planes
    ] == planes


@pytest.mark.parametrize("length", [10, 60])
def test_a_slot_that_held_nan_serves_again(backend: TorchBackend, length: int) -> None:
    driver = Driver(backend, 32)
    expected = Request(_prompt(length), slots=(1,), scratch=1)
    driver.run(expected, num_tokens=5)
    for layer in backend.pools[0].cache.layers:
        for plane in (*layer.slots.planes, *layer.scratch.planes):
            plane.fill_(torch.nan)
    for slot in range(backend.pools[0].spec.num_slots):
        backend.pools[0].will_write(slot, ALL_ENTRIES)
    again = Request(_prompt(length), slots=(1, 2), scratch=0)
    driver.run(again, num_tokens=5)
    assert [token.token_id for token in again.outputs[1]] == again.tokens == expected.tokens


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_that_does_not_exist_fails_its_step_only(backend: TorchBackend, token_id: int) -> None:
    driver = Driver(backend, 32)
    undisturbed, request = Request(_prompt(12)), Request(_prompt(12))
    driver.run(undisturbed, num_tokens=6)
    driver.read(request)
    draw = Draw(GREEDY)
    bad_prompt = PrefillRow("bad", (1, token_id), 0, 2, slots=(1,), draws=(draw,))
    bad_token = DecodeRow("bad", slot=0, token_id=token_id, index=12, num_prompt_tokens=12, draw=draw)
    bad_target = replace(bad_prompt, token_ids=(1, 2), score=PromptScore((token_id,), 0))
    bad_bias = replace(
        bad_token, token_id=1, slot=1, draw=Draw(replace(GREEDY, logit_bias=((token_id, 1.0),)))
    )
    bad_ban = replace(bad_token, token_id=1, slot=1, draw=Draw(GREEDY, banned_token_ids=(token_id,)))
    prefills = [PrefillBatch((row,), PrefillShape(1, 8)) for row in (bad_prompt, bad_target)]
    batches: list[Batch] = [*prefills, *(DecodeBatch((row,)) for row in (bad_token, bad_bias, bad_ban))]
    for batch in batches:
        with pytest.raises(
            BackendError, match=f"{token_id} is not in the vocabulary of {VOCAB_SIZE}"
        ) as raised:
            backend.submit(batch).result()
        assert not isinstance(raised.value, BackendUnusableError)
    driver.decode(request, num_steps=5)
    assert request.tokens == undisturbed.tokens


def test_a_failing_device_is_unusable(backend: TorchBackend) -> None:
    """No CPU fails like this, so the error is made here."""

    def fail(**_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    backend._model = fail  # type: ignore[assignment]
    with pytest.raises(BackendUnusableError, match="illegal memory access"):
        backend.submit(DecodeBatch((DecodeRow("x", 0, 1, 1, 1, Draw(GREEDY)),))).result()


def test_elapsed_is_by_the_backends_clock(config: TorchBackendConfig) -> None:
    clock = VirtualClock()
    backend = TorchBackend(config, clock)
    batch = DecodeBatch((DecodeRow("x", 0, 1, 1, 1, Draw(GREEDY)),))
    assert backend.submit(batch).result().elapsed == 0

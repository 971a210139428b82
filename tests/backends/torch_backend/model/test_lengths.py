"""Models whose attention depends on the server's maximum length."""

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from backends.torch_backend import memory
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.model.language_model import text_config
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.preparation import prepare_model
from backends.torch_backend.spec import resolve_max_model_len
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.families import model_class, save_tiny, tiny_config
from tests.backends.oracle import assert_same_logprobs, continue_greedily, random_prompt
from tests.backends.torch_backend.test_exact_full import OBSERVED

FULL = PolicyOptions(PolicyName.FULL)
ORIGINAL = 32
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [2.0 + place for place in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}


ROTARY = {"rope_parameters": ROPE, "original_max_position_embeddings": ORIGINAL}


def _oracle(folder: Path, factors: str) -> PreTrainedModel:
    """Load the checkpoint in transformers with one set of factors for all lengths."""
    path = folder / "config.json"
    saved = path.read_text()
    config = json.loads(saved)
    rope = config["rope_parameters"]
    rope |= {"short_factor": rope[factors], "long_factor": rope[factors]}
    path.write_text(json.dumps(config))
    oracle: PreTrainedModel = model_class(tiny_config("phi3")).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    path.write_text(saved)
    return oracle


@pytest.mark.parametrize(("max_model_len", "factors"), [(ORIGINAL, "short_factor"), (48, "long_factor")])
def test_the_maximum_length_chooses_the_factors(
    max_model_len: int, factors: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For every sequence of a server: a short one, and one that becomes long."""
    save_tiny(tiny_config("phi3", num_key_value_heads=4, **ROTARY), tmp_path)
    oracle = _oracle(tmp_path, factors)
    caplog.set_level(logging.INFO)
    backend = open_backend(tmp_path, FULL, max_model_len=max_model_len)
    assert f"the factors for {factors.removesuffix('_factor')} sequences are used" in caplog.text
    driver = Driver(backend, 8)
    short, long = (
        Request(random_prompt(n), slots=(slot,), sampling=OBSERVED) for slot, n in ((0, 3), (1, 27))
    )
    driver.read(long, short)
    driver.decode(short, long, num_steps=max_model_len - 27)
    for request in (short, long):
        expected = continue_greedily(oracle, request.prompt, len(request.tokens))
        assert request.tokens == expected.tokens
        assert_same_logprobs(request.outputs[0], expected.logits, 20)
    backend.close()


def test_each_choice_of_factors_has_scores_of_its_own(tmp_path: Path) -> None:
    save_tiny(tiny_config("phi3", num_key_value_heads=4, **ROTARY), tmp_path)
    names = {
        prepare_model(
            TorchBackendConfig(
                str(tmp_path), (PoolOptions(1, PolicyOptions()),), length, device=DeviceName.CPU
            ),
            Kernels(),
            None,
            has_recorder=False,
        ).scores_name
        for length in (ORIGINAL - 1, ORIGINAL, 48)
    }
    assert len(names) == 2


def opened(folder: Path, max_model_len: int | None, archive: Path | None = None) -> TorchBackend:
    return TorchBackend(
        TorchBackendConfig(
            str(folder),
            (PoolOptions(2, FULL),),
            max_model_len,
            device=DeviceName.CPU,
            dtype=DtypeName.FLOAT32,
            prefix_cache_bytes=1 << 24,
            prefix_cache_dir=archive,
            compile=False,
        )
    )


def test_stored_keys_know_the_factors(tmp_path: Path) -> None:
    save_tiny(tiny_config("phi3", num_key_value_heads=4, **ROTARY), tmp_path)
    for length in (ORIGINAL, ORIGINAL - 1, 48):
        opened(tmp_path, length, tmp_path / "archive").close()
    assert len(list((tmp_path / "archive").iterdir())) == 2


def test_the_factors_are_those_of_the_length_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And garbage is collected before memory is read, even while a server loads."""
    monkeypatch.setattr(memory, "DEFAULT_MAX_MODEL_LEN", ORIGINAL)
    save_tiny(tiny_config("phi3", num_key_value_heads=4, **ROTARY), tmp_path)
    caplog.set_level(logging.INFO)
    garbage: list[Any] = [torch.zeros(1)]
    garbage.append(garbage)
    tensor = weakref.ref(garbage[0])
    gc.disable()
    try:
        del garbage
        backend = opened(tmp_path, None)
    finally:
        gc.enable()
    assert backend.spec.max_model_len == ORIGINAL
    assert "the factors for short sequences are used" in caplog.text
    assert tensor() is None


def test_llama_4_within_its_first_chunk(tmp_path: Path) -> None:
    config = tiny_config("llama4", attention_chunk_size=48)
    oracle = save_tiny(config, tmp_path)
    backend = open_backend(tmp_path, FULL, max_model_len=48)
    request = Request(random_prompt(29), slots=(1,), sampling=OBSERVED)
    Driver(backend, 8).run(request, num_tokens=48 - 29)
    expected = continue_greedily(oracle, request.prompt, len(request.tokens))
    assert request.tokens == expected.tokens
    assert_same_logprobs(request.outputs[0], expected.logits, 20)
    backend.close()


@pytest.mark.parametrize("change", [{"attention_chunk_size": 48}, {"floor_scale": 48}])
def test_llama_4_beyond_its_first_chunk_is_refused(change: dict[str, int]) -> None:
    text = text_config(tiny_config("llama4", **change))
    with pytest.raises(ValueError, match="max_model_len 49 exceeds the model's longest sequence of 48"):
        resolve_max_model_len(TorchBackendConfig("llama4", max_model_len=49), text)

"""The language model of a checkpoint with other parts is served alone, and equals the whole model's text."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nConfig, PreTrainedModel, SiglipConfig

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.language_model import trimmed_class
from backends.torch_backend.model.loading import load_model
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.scorer import WindowScorer
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.families import edit_weights, model_class, save_tiny, stored_weights, tiny_config
from tests.backends.oracle import assert_same_logprobs, continue_greedily, random_prompt
from tests.backends.torch_backend.test_exact_full import OBSERVED

CHUNK = 8


def _check(backend: TorchBackend, oracle: PreTrainedModel, length: int, num_tokens: int = 9) -> None:
    request = Request(random_prompt(length), slots=(1,), sampling=OBSERVED)
    Driver(backend, CHUNK).run(request, num_tokens=num_tokens)
    expected = continue_greedily(oracle, request.prompt, num_tokens)
    assert request.tokens == expected.tokens
    assert_same_logprobs(request.outputs[0], expected.logits, 20)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gemma3", {"tie_word_embeddings": True}),  # no output layer in the files
        ("qwen2_5_vl", {}),  # three positions a token
        ("llava_next", {}),  # a weight beside all modules; the language model is another type's
        ("qwen3_vl_moe", {}),  # experts
        ("gemma4", {}),  # layers that attend to what others store
    ],
)
def test_equals_the_whole_model(
    model_type: str, change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save_tiny(tiny_config(model_type, **change), tmp_path)
    weights = stored_weights(tmp_path)
    others = {name for name in weights if "vision" in name or "visual" in name}
    assert others
    # Without them in the files: they are not read.
    edit_weights(tmp_path, {name: weight for name, weight in weights.items() if name not in others})

    caplog.set_level(logging.INFO)
    backend = open_backend(tmp_path, PolicyOptions(PolicyName.FULL), max_model_len=64)
    assert f"{model_type}: the language model alone is loaded and served, without v" in caplog.text
    for length in (3, 29):
        _check(backend, oracle, length)
    backend.close()


def test_the_start_line_counts_the_language_model_alone(tmp_path: Path) -> None:
    oracle = save_tiny(tiny_config("mistral3"), tmp_path)
    alone = load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)
    decoder: Any = oracle.get_decoder()  # type: ignore[no-untyped-call]
    assert alone.num_parameters() == decoder.num_parameters() + oracle.lm_head.weight.numel()
    assert alone.num_parameters() < oracle.num_parameters()


def test_gemma3n_as_published(tmp_path: Path) -> None:
    """The other parts need a package to be built, and are not."""
    oracle = save_tiny(tiny_config("gemma3n_text"), tmp_path)
    edit_weights(
        tmp_path,
        {name.replace("model.", "model.language_model.", 1): weight
         for name, weight in stored_weights(tmp_path).items()}
        | {"model.vision_tower.weight": torch.zeros(2)},
    )  # fmt: skip
    text = json.loads((tmp_path / "config.json").read_text())
    Gemma3nConfig(text_config=text).save_pretrained(tmp_path)
    backend = open_backend(tmp_path, PolicyOptions(PolicyName.FULL), max_model_len=64)
    for length in (3, 29):
        _check(backend, oracle, length)
    backend.close()


def test_missing_weights_of_the_language_model(tmp_path: Path) -> None:
    save_tiny(tiny_config("mistral3"), tmp_path)
    weights = stored_weights(tmp_path)
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    edit_weights(tmp_path, weights)
    with pytest.raises(Exception, match=r"lacks 1 of its model's weights.*layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


def test_shared_entries_in_scratches_and_slots(tmp_path: Path) -> None:
    """Layers that store nothing attend to a scratch and to a packed slot; neighbours change nothing."""
    oracle = save_tiny(tiny_config("gemma4"), tmp_path)
    policy = PolicyOptions(
        PolicyName.SNAPSTREAM,
        num_sink=2,
        num_recent=12,
        num_kept=24,
        scorer=WindowScorer(observation_window=4, pooling_size=3),
    )
    backend = open_backend(tmp_path, policy, max_model_len=96)
    length = 30
    assert length > backend.spec.pools[0].max_direct_tokens
    _check(backend, oracle, length, num_tokens=4)  # the slot holds everything

    driver = Driver(backend, CHUNK)
    alone = Request(random_prompt(70), slots=(2,))
    driver.run(alone, num_tokens=20)
    together = Request(random_prompt(70), slots=(0,))
    others = [Request(random_prompt(n), slots=(slot,), scratch=1) for slot, n in ((1, 5), (3, 44))]
    driver.read(others[0])
    driver.read(together)
    driver.decode(together, others[0], num_steps=3)
    driver.read(others[1])
    driver.decode(*others, together, num_steps=16)
    assert together.tokens == alone.tokens
    backend.close()


def test_types_without_text() -> None:
    with pytest.raises(UnsupportedModelError, match="no model of this type that writes text"):
        trimmed_class(SiglipConfig())


def test_attention_to_the_whole_prompt_is_refused(tmp_path: Path) -> None:
    config = tiny_config("paligemma")
    model_class(config)(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="not causal"):
        open_backend(tmp_path, PolicyOptions(PolicyName.FULL), max_model_len=64)

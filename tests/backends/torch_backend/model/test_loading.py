"""Loading checkpoints from disk, and what is refused.

The kinds of models that are refused by name are in `test_invalid_values_are_refused`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    GPTJConfig,
    LlamaConfig,
    LongcatFlashConfig,
    NemotronConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from backends.torch_backend.config import DeviceName, DtypeName
from backends.torch_backend.errors import ModelLoadError, UnsupportedModelError
from backends.torch_backend.model.attention import ATTENTION_NAME
from backends.torch_backend.model.loading import check_config, load_model, resolve_device, resolve_dtype
from backends.torch_backend.model.probe import probe_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _save(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return str(folder)


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_layers_are_found_by_watching(tmp_path: Path) -> None:
    config = Qwen2Config(
        **SIZES,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
    )
    model = load_model(_save(config, tmp_path), DeviceName.CPU, DtypeName.BFLOAT16)
    assert model.config._attn_implementation == ATTENTION_NAME
    layers = probe_layers(model)
    assert [(layer.num_heads, layer.num_kv_heads, layer.sliding_window) for layer in layers] == [
        (4, 2, None),
        (4, 2, 16),
    ]
    assert [(plane.name, plane.width, plane.dtype) for plane in layers[0].planes] == [
        ("key", 8, torch.bfloat16),
        ("value", 8, torch.bfloat16),
    ]


def test_there_must_be_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nothing-here"):
        load_model(str(tmp_path / "nothing-here"), DeviceName.CPU, DtypeName.AUTO)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    _save(LlamaConfig(**SIZES), tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    config = {
        "model_type": "unheard-of",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


@pytest.mark.parametrize("problem", ["missing", "shape"])
def test_incomplete_weights_are_refused(problem: str, tmp_path: Path) -> None:
    _save(LlamaConfig(**SIZES), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(
        tmp_path,
        lambda weights: (
            weights.update({name: torch.zeros(3, 5)}) if problem == "shape" else weights.__delitem__(name)
        ),
    )
    with pytest.raises(ModelLoadError, match="up_proj"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "t5: encoder–decoder"),
        (
            GlmMoeDsaConfig(indexer_types=["full", "shared"] * 39),
            "glm_moe_dsa: layers that share the choice of an indexer are not supported",
        ),
        (
            LongcatFlashConfig(),
            "longcat_flash: multi-head latent attention is supported for deepseek_v2, deepseek_v3, ",
        ),
    ],
)
def test_refused_by_configuration(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_config(config)


def test_refused_by_class(tmp_path: Path) -> None:
    GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPTJForCausalLM takes no attention function"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


def test_refused_by_watching(tmp_path: Path) -> None:
    """This model accepts an attention function and does not pass on its arguments."""
    model = load_model(_save(NemotronConfig(**SIZES), tmp_path), DeviceName.CPU, DtypeName.AUTO)
    with pytest.raises(UnsupportedModelError, match="NemotronForCausalLM does not run with a cache of slots"):
        probe_layers(model)


@pytest.mark.parametrize(
    ("asked", "stored", "device", "expected"),
    [
        (DtypeName.AUTO, torch.bfloat16, "cpu", torch.bfloat16),
        (DtypeName.AUTO, torch.float16, "cpu", torch.float32),
        (DtypeName.AUTO, torch.float16, "cuda", torch.float16),
        (DtypeName.AUTO, None, "cpu", torch.float32),
        (DtypeName.FLOAT16, torch.bfloat16, "cpu", torch.float16),
    ],
)
def test_dtype(asked: DtypeName, stored: torch.dtype | None, device: str, expected: torch.dtype) -> None:
    assert resolve_dtype(asked, LlamaConfig(**SIZES, dtype=stored), torch.device(device)) is expected


def test_the_checkpoints_dtype_is_the_models(tmp_path: Path) -> None:
    name = _save(LlamaConfig(**SIZES), tmp_path, torch.bfloat16)
    assert load_model(name, DeviceName.CPU, DtypeName.AUTO).dtype is torch.bfloat16
    assert load_model(name, DeviceName.CPU, DtypeName.FLOAT32).dtype is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_without_cuda() -> None:
    assert resolve_device(DeviceName.AUTO) == torch.device("cpu")
    with pytest.raises(ModelLoadError, match="cuda"):
        resolve_device(DeviceName.CUDA)

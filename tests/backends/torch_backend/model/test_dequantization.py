"""Quantised checkpoints load as the weights that their numbers stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backends.torch_backend.config import DeviceName, DtypeName
from backends.torch_backend.errors import ModelLoadError, UnsupportedModelError
from backends.torch_backend.model.dequantization import layouts
from backends.torch_backend.model.loading import load_model
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.driver import Driver, Request, open_backend
from tests.backends.families import edit_weights, save_tiny, stored_weights, tiny_config
from tests.backends.oracle import continue_greedily, random_prompt
from tests.backends.quantized_files import KINDS, fp8_blocks


def quantise(folder: Path, kind: str, dtype: str = "float32") -> dict[str, Tensor]:
    """Quantise the linear layers of a checkpoint in place. Returns the weights that it then stands for."""
    pack, quantization = KINDS[kind]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in stored_weights(folder).items():
        if name.endswith("_proj.weight"):
            packed = pack(weight.float())
            stored |= {name.removesuffix(".weight") + ending: each for ending, each in packed.tensors.items()}
            plain[name] = packed.weight
        else:
            stored[name] = plain[name] = weight
    edit_weights(folder, stored)
    _edit_config(folder, quantization, dtype)
    return plain


def _edit_config(folder: Path, quantization: dict[str, Any], dtype: str = "float32") -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": dtype}
    # Where Kimi K2.5 has it; other models with several parts have it at the top.
    place = config["text_config"] if config["model_type"] == "llava" else config
    place["quantization_config"] = quantization
    path.write_text(json.dumps(config))


def _plain(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Write the checkpoint of other weights that is not quantised, beside one that is."""
    path = folder.with_name(f"{folder.name}-plain")
    path.mkdir()
    config = json.loads((folder / "config.json").read_text())
    for each in (config, config.get("text_config", {})):
        each.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config))
    edit_weights(path, weights)
    return path


def _assert_same_weights(folder: Path, expected: Path, dtype: DtypeName = DtypeName.AUTO) -> None:
    model, dense = (load_model(str(path), DeviceName.CPU, dtype) for path in (folder, expected))
    weights, dense_weights = model.state_dict(), dense.state_dict()
    assert weights.keys() == dense_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, dense_weights[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_the_numbers_stand_for(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(tiny_config("qwen3", intermediate_size=112), folder)
    plain = quantise(folder, kind)
    _assert_same_weights(folder, _plain(folder, plain))


@pytest.mark.parametrize(
    ("model_type", "kind"), [("qwen3_moe", "fp8"), ("qwen3_moe", "gptq-4"), ("llava", "awq")]
)
def test_experts_and_text_parts(model_type: str, kind: str, tmp_path: Path) -> None:
    """The experts are stored one by one, and joined. The other parts' weights are not quantised."""
    folder = tmp_path / "model"
    save_tiny(tiny_config(model_type), folder)
    plain = quantise(folder, kind)
    dense = _plain(folder, plain)
    _assert_same_weights(folder, dense)


def test_served_like_its_dense_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(tiny_config("qwen3"), folder)
    dense = _plain(folder, quantise(folder, "compressed-w4a16"))
    oracle = load_model(str(dense), DeviceName.CPU, DtypeName.AUTO)
    oracle.set_attn_implementation("eager")
    backend = open_backend(folder, PolicyOptions(PolicyName.FULL), max_model_len=64)
    request = Request(random_prompt(20), slots=(1,))
    Driver(backend, 8).run(request, num_tokens=9)
    assert request.tokens == continue_greedily(oracle, request.prompt, 9).tokens
    backend.close()


def _mxfp4(folder: Path) -> dict[str, Tensor]:
    """Store the experts of gpt-oss in MXFP4. Returns the plain weights, by transformers' own conversion."""
    stored, plain = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in stored_weights(folder).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = plain[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(
            256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(118, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert plain[name].shape == weight.shape
    edit_weights(folder, stored)
    _edit_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def test_mxfp4_equals_transformers_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(tiny_config("gpt_oss"), folder)
    plain = _mxfp4(folder)
    _assert_same_weights(folder, _plain(folder, plain))


@pytest.mark.parametrize("shape", [(48, 72), (3, 48, 24)])
def test_fp8_equals_transformers_conversion(shape: tuple[int, ...]) -> None:
    """Of whole blocks: transformers refuses others."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = [fp8_blocks(each).tensors for each in weight.view(-1, *shape[-2:])]
    stored = torch.stack([each[".weight"] for each in packed]).view(shape)
    scales = torch.stack([each[".weight_scale_inv"] for each in packed])
    scales = scales.view(*shape[:-2], *scales.shape[1:])
    (layout,) = layouts(KINDS["fp8"].config, "qwen3")
    ours = layout.dequantize({"": stored, "_scale_inv": scales}, torch.bfloat16)
    theirs = Fp8Dequantize(None)._dequantize_one(stored, scales, torch.bfloat16)  # type: ignore[no-untyped-call]
    assert torch.equal(ours, theirs)


def test_scales_as_exponents() -> None:
    stored = torch.randn(48, 24, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120], [130]], dtype=torch.uint8)
    (layout,) = layouts(KINDS["fp8"].config, "qwen3")
    ours = layout.dequantize({"": stored, "_scale_inv": exponents}, torch.float32)
    assert torch.equal(ours[:24], stored[:24].float() / 128)
    assert torch.equal(ours[24:], stored[24:].float() * 8)


def test_float16_becomes_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    """Where a checkpoint that is not quantised becomes float32, of twice the size."""
    folder = tmp_path / "model"
    save_tiny(tiny_config("qwen3"), folder)
    dense = _plain(folder, quantise(folder, "gptq-4", dtype="float16"))
    assert load_model(str(folder), DeviceName.CPU, DtypeName.AUTO).dtype is torch.bfloat16
    _assert_same_weights(folder, dense, DtypeName.BFLOAT16)


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tiny_config("qwen3"), tmp_path)
    quantise(tmp_path, "gptq-4")
    weights = stored_weights(tmp_path)
    del weights["model.layers.2.mlp.up_proj.scales"]
    edit_weights(tmp_path, weights)
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.2\.mlp\.up_proj\.scales"):
        load_model(str(tmp_path), DeviceName.CPU, DtypeName.AUTO)


def _compressed(**items: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", **items}


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' cannot be read"),
        ({"quant_method": "hqq"}, "'hqq' cannot be read"),
        ({}, "'unknown' cannot be read"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 cannot be read without a GPU"),
        (_compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized cannot be read without a GPU"),
        (_compressed(format="marlin-24"), "format marlin-24"),
        (_compressed(config_groups={"a": {"weights": {"num_bits": 3}}}), "of 3 bits"),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (_compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    ],
)
def test_others_are_refused_with_what_to_do(quantization: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama: .*{reason}.*: use the checkpoint as it was"):
        layouts(quantization, "llama")

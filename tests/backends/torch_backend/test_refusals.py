"""Models that slots cannot hold exactly are refused by name when they are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)

from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, TorchBackendConfig
from backends.torch_backend.errors import UnsupportedModelError
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions
from tests.backends.checkpoints import save_checkpoint
from tests.backends.driver import open_backend

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}


def _config(kind: str) -> PreTrainedConfig:
    match kind:
        case "dynamic":
            return LlamaConfig(
                **_SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            )
        case "mamba":
            return MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
        case "jamba":
            return JambaConfig(
                **_SIZES, **_EXPERTS, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1
            )
        case "no layer of lfm2forcausallm attends":
            return Lfm2Config(**_SIZES, layer_types=["conv", "conv"])
    return LlamaConfig(**_SIZES)


@pytest.mark.parametrize(
    "kind", ["dynamic", "mamba", "jamba", "no layer of lfm2forcausallm attends", "nvfp4"]
)
def test_refused_by_name(kind: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(_config(kind)).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    if kind == "nvfp4":
        path = tmp_path / "config.json"
        path.write_text(
            json.dumps(
                json.loads(path.read_text())
                | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
            )
        )
    with pytest.raises(UnsupportedModelError, match=f"(?i){kind}"):
        open_backend(tmp_path, PolicyOptions(PolicyName.FULL), max_model_len=32)


@pytest.mark.parametrize("architecture", ["deepseek-v2", "deepseek-v3"])
def test_latents_in_8_bits_are_refused(tmp_path: Path, architecture: str) -> None:
    config = TorchBackendConfig(
        str(save_checkpoint(architecture, tmp_path)),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        pools=(PoolOptions(), PoolOptions(name="small", kv_cache_dtype=KVCacheDtype.INT8)),
        max_model_len=64,
    )
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype must be auto for a model that caches latents .*int8"
    ):
        TorchBackend(config)


def test_fp8_needs_a_gpu(tmp_path: Path) -> None:
    config = TorchBackendConfig(
        str(save_checkpoint("llama", tmp_path)),
        device=DeviceName.CPU,
        pools=(PoolOptions(kv_cache_dtype=KVCacheDtype.FP8),),
        max_model_len=64,
    )
    with pytest.raises(ValueError, match=r"^kv_cache_dtype fp8 needs device cuda, got cpu; int8 takes"):
        TorchBackend(config)

"""The attention over latents against transformers' own, and what its slots cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from backends.torch_backend.model.attention import MASKED, AttentionOptions, grouped_attention
from backends.torch_backend.model.latent import LatentAttention
from backends.torch_backend.torch_private import onednn
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.driver import open_backend

_PUBLISHED = Path("backends/sn40l/description/data/models/deepseek-r1.json")
DEEPSEEK_R1: dict[str, Any] = {
    name: value
    for name, value in json.loads(_PUBLISHED.read_text()).items()
    if name.endswith(("_dim", "_rank"))
}
ROWS, HEADS, HIDDEN_SIZE = 2, 4, 48
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "attn_implementation": "eager",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 1.0,
}


class _Sequences:
    """A cache that holds rows of one length whole."""

    def __init__(self) -> None:
        self.latents = torch.zeros(ROWS, 1, 0, _SIZES["kv_lora_rank"] + _SIZES["qk_rope_head_dim"])

    def store(self, layer: int, latents: Tensor) -> Tensor:
        assert layer == 0
        self.latents = torch.cat([self.latents, latents], dim=2)
        return self.latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        assert layer == 0
        num_queries, num_entries = query.shape[2], key.shape[2]
        is_hidden = torch.ones(num_queries, num_entries).triu(num_entries - num_queries + 1).bool()
        bias = torch.zeros(num_queries, num_entries).masked_fill(is_hidden, MASKED)
        return grouped_attention(query, key, value, bias.expand(ROWS, -1, -1), scaling=options.scaling)


def _config(kind: str) -> PreTrainedConfig:
    match kind:
        case "v2":
            return DeepseekV2Config(**_SIZES, q_lora_rank=20, attention_bias=True)
        case "v2-lite":
            return DeepseekV2Config(**_SIZES, q_lora_rank=None)
        case "v3":
            return DeepseekV3Config(**_SIZES, q_lora_rank=20, rope_parameters=_YARN)
    return DeepseekV3Config(**_SIZES, q_lora_rank=None, rope_interleave=False, attention_bias=True)


def _attention(config: PreTrainedConfig) -> DeepseekV2Attention | DeepseekV3Attention:
    attention = (
        DeepseekV2Attention(config, 0)
        if isinstance(config, DeepseekV2Config)
        else DeepseekV3Attention(config, 0)  # type: ignore[arg-type]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return attention


@pytest.mark.parametrize("kind", ["v2", "v2-lite", "v3", "v3-halves"])
@torch.no_grad()
def test_equals_the_attention_it_replaces(kind: str) -> None:
    """A chunk whose keys and values are made, one that is read absorbed, and single tokens."""
    config = _config(kind)
    rotary: nn.Module = AutoModelForCausalLM.from_config(config).model.rotary_emb  # type: ignore[no-untyped-call]
    original = _attention(config)
    ours, cache, held = LatentAttention(original), _Sequences(), DynamicCache()
    assert dict(ours.named_parameters()).keys() == dict(original.named_parameters()).keys()
    hidden = torch.randn(ROWS, 32, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    first = 0
    for length in (20, 7, 1, 1, 3):
        assert ours.absorbs(length) is (length < 20)
        chunk, index = hidden[:, first : first + length], torch.arange(first, first + length)
        angles = rotary(chunk, index[None])
        seen = torch.arange(first + length) <= index[:, None]
        mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        expected, _ = original(chunk, position_embeddings=angles, attention_mask=mask, past_key_values=held)
        found, _ = ours(chunk, angles, slot_cache=cache)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        first += length


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the types of what a matrix is multiplied by."""

    def __init__(self, sizes: set[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []
        self._sizes = sizes  # of the matrices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and args[1].shape in self._sizes:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_fast", [True, False])
@torch.no_grad()
def test_keys_and_values_are_made_in_float32_where_the_cpu_lacks_bfloat16(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(onednn, "multiplies", lambda _dtype: is_fast)
    config = _config("v3")
    rotary: nn.Module = AutoModelForCausalLM.from_config(config).model.rotary_emb  # type: ignore[no-untyped-call]
    attention = LatentAttention(_attention(config)).bfloat16()
    rank, key_width, value_width = (
        _SIZES[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    )
    sizes = {
        (rank, HEADS * (key_width + value_width)),
        (HEADS, key_width, rank),
        (HEADS, rank, value_width),
    }
    for length, num_products in ((20, 1), (1, 2)):
        cache = _Sequences()
        cache.latents = cache.latents.bfloat16()
        hidden = torch.randn(ROWS, length, HIDDEN_SIZE).bfloat16()
        with _Products(sizes) as products:
            attention(hidden, rotary(hidden, torch.arange(length)[None]), slot_cache=cache)
        assert products.dtypes == [torch.bfloat16 if is_fast else torch.float32] * num_products


def test_latents_are_read_where_they_lie_by_few_queries() -> None:
    """With the sizes of DeepSeek-R1, making a key and a value costs what 170 queries save by having them."""
    with torch.device("meta"):
        attention = LatentAttention(DeepseekV3Attention(DeepseekV3Config(**DEEPSEEK_R1), 0))
    assert attention.absorbs(170)
    assert not attention.absorbs(171)


def test_a_token_takes_the_bytes_of_its_latent(tmp_path: Path) -> None:
    """576 values a token and layer for DeepSeek-R1 (arXiv 2412.19437: d_c 512, d_R 64), for any heads."""
    latent = {
        name: DEEPSEEK_R1[name]
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    }
    small: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    config = DeepseekV3Config(
        **small,
        **latent,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        first_k_dense_replace=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]

    backend = open_backend(tmp_path, PolicyOptions(PolicyName.FULL), max_model_len=31, num_slots=3)
    layers = backend.pools[0].cache.layers
    assert len(layers) == 2
    for layer in layers:
        for cache, num_rows in ((layer.slots, 3), (layer.scratch, 2)):
            num_bytes = sum(plane.nbytes for plane in cache.planes)
            assert num_bytes == num_rows * (31 + 1) * 576 * torch.float32.itemsize  # one entry is spare

"""Small GGUF files: a Llama with random weights and the demo model's tokenizer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from bench import make_gguf
from tests.paths import DEMO_MODEL

TEMPLATE = (DEMO_MODEL / "chat_template.jinja").read_text()
_STD = 0.2
_SCALE = 0.002
# The types whose blocks the package `gguf` cannot write, and the positions of a block's 16-bit scales.
_SCALES = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}


@dataclass(frozen=True, slots=True)
class Content:
    """What a file has: the type of its matrices, and what `edit` adds to its metadata."""

    kind: Kind = Kind.Q8_0
    architecture: str = "llama"
    has_tokenizer: bool = True
    edit: Callable[[Any], None] | None = None


def write_gguf(path: Path, content: Content = Content(), seed: int = 0) -> Path:
    """Write a file with two layers, 256 wide, and return its path."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    config = _config(len(tokenizer["model"]["vocab"]))
    writer = gguf.GGUFWriter(path, content.architecture)
    make_gguf.write_sizes(writer, config.to_dict())
    if content.has_tokenizer:
        make_gguf.write_tokenizer(writer, tokenizer, config.to_dict())
        writer.add_chat_template(TEMPLATE)
    if content.edit is not None:
        content.edit(writer)
    for name, tensor in make_gguf.tensors(_weights(config, seed), config.to_dict()):
        _add_tensor(writer, name, tensor, content.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _weights(config: LlamaConfig, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    weights = LlamaForCausalLM(config).state_dict()
    return {
        name: torch.randn_like(weight) * _STD if weight.ndim == 2 else weight
        for name, weight in weights.items()
    }


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: Kind) -> None:
    values = tensor.float().numpy()
    if values.ndim == 1 or kind is Kind.F32:
        writer.add_tensor(name, values)
    elif kind is Kind.F16:
        writer.add_tensor(name, values.astype(np.float16))
    elif kind in _SCALES:
        writer.add_tensor(name, _random_blocks(values.shape, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _random_blocks(shape: tuple[int, ...], kind: Kind) -> NDArray[np.uint8]:
    """Return random blocks [row, byte] with scales that keep the weights small."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(shape[0]).integers(
        256, size=(shape[0], shape[1] // num_values, num_bytes), dtype=np.uint8
    )
    for position in _SCALES[kind]:
        blocks[..., position : position + 2] = np.array([_SCALE], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)

"""Convert a Llama checkpoint of `bench.make_model` to a GGUF file for llama.cpp.

Needs the package `gguf`. Usage: `python -m bench.make_gguf MODEL_DIR FILE.gguf`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import torch
from safetensors.torch import load_file
from torch import Tensor

# GGUF's names of a layer's tensors. The query and key projections are separate, because their rows have
# another order in GGUF.
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(model: Path, target: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    write_sizes(writer, config)
    write_tokenizer(writer, tokenizer, config)
    for name, tensor in tensors(load_file(model / "model.safetensors"), config):
        _write_tensor(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under GGUF's name. The model ties the output layer to the embedding."""
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        ours = f"model.layers.{layer}"
        theirs = f"blk.{layer}"
        for name, their_name in _LAYER_TENSORS.items():
            yield f"{theirs}.{their_name}.weight", weights[f"{ours}.{name}.weight"]
        for name, their_name, heads in (
            ("q_proj", "attn_q", "num_attention_heads"),
            ("k_proj", "attn_k", "num_key_value_heads"),
        ):
            yield (
                f"{theirs}.{their_name}.weight",
                interleaved(weights[f"{ours}.self_attn.{name}.weight"], config[heads]),
            )


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Return a projection with adjacent rotary pairs, as in llama.cpp.

    In transformers, the rows of a pair are half a head apart.
    """
    width = weight.shape[1]
    halves = weight.view(num_heads, 2, -1, width)  # [head, half, pair, width]
    return halves.transpose(1, 2).reshape(-1, width)


def write_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_name("bench")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_tokenizer(writer: Any, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    control = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL
            for index in range(len(tokens))
        ]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _write_tensor(writer: Any, name: str, tensor: Tensor) -> None:
    if tensor.ndim == 1:  # llama.cpp wants norms in float32
        writer.add_tensor(name, tensor.float().numpy())
    else:
        bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    convert(arguments.model, arguments.target)


if __name__ == "__main__":
    main()

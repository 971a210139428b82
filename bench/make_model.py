"""Write a checkpoint of random weights in bf16 and a tokenizer, for measurements of speed only.

Speed does not depend on the values of weights. The tokenizer is a byte-level BPE trained on the source of
Python's standard library, so that nothing has to be downloaded. Usage: `python -m bench.make_model DIR`.

`--architecture llama` has 100 M weights. The hybrids have about as many, and the same shape of attention in
fewer layers: `lfm2` has short convolutions in ten of sixteen layers, `falcon_h1` a Mamba-2 mixer beside
attention in every layer, `qwen3_next` gated delta nets in nine of twelve. `mixtral` has 24 experts, of
which a token uses two. `llama_1b` has the sizes of TinyLlama 1.1B, but a tied output layer.
"""

import argparse
import copy
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

VOCAB_SIZE = 32000
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ATTENTION_LAYERS: Final = (2, 5, 8, 10, 12, 14)  # of sixteen, as in LFM2 1.2B
_ARCHITECTURES: Final[Mapping[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]]] = {
    "llama": (LlamaConfig, {}),
    "llama_1b": (
        LlamaConfig,
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
        },
    ),
    "lfm2": (
        Lfm2Config,
        {
            "num_hidden_layers": 16,
            "intermediate_size": 1152,
            "block_auto_adjust_ff_dim": False,
            "layer_types": [
                "full_attention" if layer in _ATTENTION_LAYERS else "conv" for layer in range(16)
            ],
        },
    ),
    "falcon_h1": (
        FalconH1Config,
        {
            "intermediate_size": 1280,
            "mamba_d_ssm": 768,
            "mamba_n_heads": 24,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            "intermediate_size": 1792,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mlp_only_layers": list(range(12)),
        },
    ),
    "mixtral": (
        MixtralConfig,
        {"intermediate_size": 768, "num_local_experts": 24, "num_experts_per_tok": 2},
    ),
}


def model_config(architecture: str = "llama") -> PreTrainedConfig:
    kind, changes = _ARCHITECTURES[architecture]
    return kind(**copy.deepcopy({**_COMMON, **changes}))


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )


def library_source() -> Iterator[str]:
    """Yield the files of the standard library, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--architecture", choices=_ARCHITECTURES, default="llama")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    tokenizer = make_tokenizer(library_source())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(arguments.architecture), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: {model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

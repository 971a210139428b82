"""Compare the 4-bit rows of policy sparse with vector codes, and other keys that choose, on a real model.

A model reads a text. In each attention layer, the last tokens then attend as a step of policy sparse does:
to sinks, ring, and the best tokens of all between them. Each setting has its own quantiser of the keys that
choose, and of the keys and values that are attended to. The vector codes have the word sizes of YAKV
(arXiv 2604.08426): a rotated row is scaled by its norm, and groups of 2 or 4 values are the nearest of 256
words, which suit a normal distribution. We train these words ourselves. Unlike there, each KV head has its
own scale and rotation, and keys are stored after their rotary embedding.

Figures are means over texts and layers. In a layer, each is a sum over KV heads and queries over another:

- key, value: squared error of the rows over their squares;
- share: of the attention that the best tokens by exact keys get, what the chosen tokens get;
- rows: squared error of the attention's output over its square, against the exact rows of the same tokens;
- output: the same against attention to every token.

Controls that must lose: keys that are means of eight neighbours, and random tokens.

Usage: `python -m bench.quantisers --model DIR|FILE.gguf --texts FILE… [--length 4096] [--num-attended 128]
[--json FILE]`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import sdpa_mask

from backends.torch_backend.model.gguf_file import convert
from cache.layout import part_size
from cache.low_bits import dequantize, quantize, rotate
from commands.shared.table import table

NUM_SINK = 4
NUM_RECENT = 124
NUM_WORDS = 256
GROUP = 8  # neighbours that share a landmark
_SAMPLES = 1 << 16
_ROUNDS = 40  # of Lloyd's algorithm

Codec = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's last queries [head, query, width], and its keys and values [kv_head, token, width]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What chooses tokens, and what they are attended to by. Codecs return rows as they are read back."""

    name: str
    choosing: Codec
    key: Codec
    value: Codec


def uniform(rows: Tensor, bits: int) -> Tensor:
    """Return rows [..., width] after our own quantiser: evenly spaced levels of the rotated row."""
    return rotate(dequantize(*quantize(rotate(rows), bits), bits))


def uniform_by_part(rows: Tensor) -> Tensor:
    """Return rows after 4 bits with a step for each part of a rotated row."""
    parts = torch.unflatten(rotate(rows), -1, (-1, part_size(rows.shape[-1])))
    return rotate(dequantize(*quantize(parts, 4), 4).flatten(-2))


def less_mean(rows: Tensor) -> Tensor:
    """Return rows [kv_head, token, width] after 4 bits of what is left without the mean of all but sinks."""
    mean = rows[:, NUM_SINK:].mean(1, keepdim=True)
    return uniform_by_part(rows - mean) + mean


def less_early_mean(rows: Tensor) -> Tensor:
    """As `less_mean`, with the mean of the first quarter alone, as for a long answer to a short prompt."""
    mean = rows[:, NUM_SINK : rows.shape[1] // 4].mean(1, keepdim=True)
    return uniform_by_part(rows - mean) + mean


def vectors(rows: Tensor, width: int) -> Tensor:
    """Return rows after vector codes: each group of `width` values of the rotated row is a word."""
    rotated = rotate(rows)
    scales = rotated.square().mean(-1, keepdim=True).sqrt().to(torch.bfloat16).float().clamp(min=1e-20)
    words = codebook(width)
    groups = (rotated / scales).reshape(-1, width)
    parts = range(0, len(groups), _SAMPLES)
    nearest = torch.cat([_nearest(groups[start : start + _SAMPLES], words) for start in parts])
    return rotate(words[nearest].view(rotated.shape) * scales)


def means(rows: Tensor) -> Tensor:
    """Return the mean over each token's group of neighbours, [..., token, width]. Sinks have no group."""
    sinks, others = rows[..., :NUM_SINK, :], rows[..., NUM_SINK:, :]
    num_tokens = others.shape[-2]
    padded = pad(others, (0, 0, 0, -num_tokens % GROUP))
    grouped = padded.view(*rows.shape[:-2], -1, GROUP, rows.shape[-1]).mean(-2)
    return torch.cat([sinks, grouped.repeat_interleave(GROUP, dim=-2)[..., :num_tokens, :]], -2)


def noise(rows: Tensor) -> Tensor:
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))


@lru_cache
def codebook(width: int) -> Tensor:
    """Return 256 words of `width` values that have a small squared error on a normal distribution."""
    samples = torch.randn(_SAMPLES, width, generator=torch.Generator().manual_seed(0))
    words = samples[:NUM_WORDS].clone()
    for _ in range(_ROUNDS):
        nearest = _nearest(samples, words)
        sums = torch.zeros_like(words).index_add_(0, nearest, samples)
        counts = torch.bincount(nearest, minlength=NUM_WORDS)
        words = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], words)
    return words


def _nearest(groups: Tensor, words: Tensor) -> Tensor:
    return (groups @ words.T - words.square().sum(1) / 2).argmax(1)


def _exact(rows: Tensor) -> Tensor:
    return rows


_uniform_2, _uniform_4 = partial(uniform, bits=2), partial(uniform, bits=4)
_vectors_2, _vectors_4 = partial(vectors, width=4), partial(vectors, width=2)

SETTINGS = (
    Setting("exact keys choose, exact rows", _exact, _exact, _exact),
    Setting("4 bits, uniform, one step", _uniform_4, _uniform_4, _uniform_4),
    Setting("4 bits, uniform, a step for 64", uniform_by_part, uniform_by_part, uniform_by_part),
    Setting("the same, keys less their mean (policy sparse)", less_mean, less_mean, uniform_by_part),
    Setting("the same, keys less the mean of a quarter", less_early_mean, less_early_mean, uniform_by_part),
    Setting("the same, keys and values less their means", less_mean, less_mean, less_mean),
    Setting("4 bits, vectors", _vectors_4, _vectors_4, _vectors_4),
    Setting("2 bits uniform choose, 4 uniform", _uniform_2, _uniform_4, _uniform_4),
    Setting("2 bits vectors choose, 4 vectors", _vectors_2, _vectors_4, _vectors_4),
    Setting("2 bits uniform for all", _uniform_2, _uniform_2, _uniform_2),
    Setting("2 bits vectors for all", _vectors_2, _vectors_2, _vectors_2),
    Setting("control: means of eight choose", means, _uniform_4, _uniform_4),
    Setting("control: random tokens", noise, _uniform_4, _uniform_4),
)


def attention_of(model: str, texts: Sequence[str], length: int, num_queries: int) -> list[Attention]:
    """Return what `capture` does for the first `length` tokens of texts. `model` is a folder or a GGUF file.

    Raises ValueError for a shorter text.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(model)
        if folder.is_file():
            folder = Path(scratch)
            convert(Path(model), folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :length] for text in texts]
        for prompt in prompts:
            if prompt.shape[1] < length:
                raise ValueError(f"the text must have at least {length} tokens, got {prompt.shape[1]}")
        return capture(folder, prompts, num_queries)


def capture(folder: Path, prompts: Sequence[Tensor], num_queries: int) -> list[Attention]:
    """Return the attention of each layer without a window to prompts, each [1, token].

    Raises ValueError for a model whose scores are capped or have sinks.
    """
    found: list[Attention] = []

    def attend(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **rest: Any
    ) -> tuple[Tensor, None]:
        if rest.get("softcap") is not None or rest.get("s_aux") is not None:
            raise ValueError("models whose attention has a softcap or sinks are not compared")
        window = rest.get("sliding_window")
        if window is None or window >= query.shape[2]:
            found.append(Attention(query[0, :, -num_queries:], key[0], value[0], scaling))
        output = scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    AttentionInterface.register("captured", attend)
    AttentionMaskInterface.register("captured", sdpa_mask)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="captured"
    )
    with torch.inference_mode():
        for token_ids in prompts:
            loaded(token_ids, use_cache=False, logits_to_keep=1)
    return found


def figures(layers: Sequence[Attention], setting: Setting, num_attended: int) -> Mapping[str, float]:
    """Return the means over layers of one setting."""
    each = [_of_layer(layer, setting, num_attended) for layer in layers]
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def _of_layer(layer: Attention, setting: Setting, num_attended: int) -> dict[str, float]:
    kv_heads, num_tokens, _ = layer.key.shape
    num_queries = layer.query.shape[1]
    grouped = layer.query.float().view(kv_heads, -1, num_queries, layer.query.shape[2])
    key, value = layer.key.float(), layer.value.float()
    position = torch.arange(num_tokens)
    query_position = position[-num_queries:, None]
    is_seen = position <= query_position
    is_exact = (position < NUM_SINK) | (position > query_position - NUM_RECENT)
    is_stored = is_seen & ~is_exact

    def scores(keys: Tensor, mask: Tensor) -> Tensor:
        """Return [kv_head, group, query, token]."""
        products = grouped @ keys[:, None].transpose(2, 3) * layer.scale
        return products.masked_fill(~mask, float("-inf"))

    def chosen(keys: Tensor) -> Tensor:
        """Return the best stored tokens for any head of the group as [kv_head, 1, query, token]."""
        strengths = scores(keys, is_stored).log_softmax(-1).amax(1, keepdim=True)
        best = strengths.topk(num_attended, dim=-1).indices
        return torch.zeros_like(strengths, dtype=torch.bool).scatter_(3, best, value=True)

    exact_scores = scores(key, is_seen)
    weights = exact_scores.softmax(-1)
    output = weights @ value[:, None]
    choice = chosen(setting.choosing(key))
    held_key, held_value = setting.key(key), setting.value(value)

    def attended(held_scores: Tensor, held_value: Tensor) -> Tensor:
        """Return the output of attention to sinks, ring and the chosen tokens."""
        mixed = torch.where(is_exact, exact_scores, held_scores)
        mixed = mixed.masked_fill(~(is_exact & is_seen | choice), float("-inf")).softmax(-1)
        return (mixed * is_exact) @ value[:, None] + (mixed * ~is_exact) @ held_value[:, None]

    found = attended(scores(held_key, is_seen), held_value)
    return {
        "key_error": _error(held_key, key),
        "value_error": _error(held_value, value),
        "share": float((weights * choice).sum() / (weights * chosen(key)).sum()),
        "rows_error": _error(found, attended(exact_scores, value)),
        "output_error": _error(found, output),
    }


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 for sizes or a model that cannot be compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--num-attended", type=int, default=128)
    parser.add_argument("--num-queries", type=int, default=32, help="of the last tokens")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args(arguments)
    most = parsed.length - parsed.num_queries + 1 - NUM_SINK - NUM_RECENT
    try:
        if not 0 < parsed.num_attended <= most:
            raise ValueError(f"--num-attended must be from 1 to the {most} stored tokens")
        texts = [path.read_text() for path in parsed.texts]
        layers = attention_of(parsed.model, texts, parsed.length, parsed.num_queries)
    except ValueError as error:
        print(f"bench.quantisers: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        rows.append({"setting": setting.name, **figures(layers, setting, parsed.num_attended)})
        print(f"{len(rows)} of {len(SETTINGS)} settings", file=sys.stderr)
    names = ["key_error", "value_error", "share", "rows_error", "output_error"]
    print(
        table(
            ["setting", *names], [[row["setting"], *(f"{row[name]:.4f}" for name in names)] for row in rows]
        )
    )
    if parsed.json is not None:
        document = {
            "model": Path(parsed.model).name,
            "texts": [text.name for text in parsed.texts],
            "length": parsed.length,
            "num_attended": parsed.num_attended,
            "num_queries": parsed.num_queries,
            "num_layers": len(layers) // len(parsed.texts),
            "settings": rows,
        }
        parsed.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

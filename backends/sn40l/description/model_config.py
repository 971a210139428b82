"""What a model weighs, holds and computes, from the `config.json` that Hugging Face publishes with it.

It has dense, grouped-query and latent (MLA) attention, sliding windows, experts with and without shared ones,
and a precision for each part. Norms and biases are left out: they are under a thousandth of any model. This
module knows no machines and no time.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from cache.layout import stored_row_bytes


class ModelConfigError(ValueError):
    """A config.json that does not describe a model which this module understands."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter or cache element."""

    attention: float
    ffn: float
    experts: float
    embedding: float
    cache: float


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. Decode reads a latent (MLA) cache absorbed: all heads share one entry."""

    input_params: int  # projections to queries, keys and values
    output_params: int
    num_heads: int
    num_kv_heads: int  # heads of the cache: 1 for a latent
    cache_width: int  # elements that a token leaves in the cache
    key_width: int  # of these, elements of keys: all of a latent's are both key and value
    expanded_width: int  # elements of a token's keys and values while a prompt is read
    prefill_width: int  # multiply-adds of a head for one query and one key, scores and values together
    decode_width: int  # the same, over the cached form
    window: int | None = None

    def num_entries(self, capacity: int) -> int:
        """Return the cache entries of a slot of this capacity: a sliding window bounds them."""
        return capacity if self.window is None else min(capacity, self.window)

    @property
    def score_width(self) -> int:
        """Multiply-adds of a head's score for one query and one key in the cache."""
        return self.key_width // self.num_kv_heads

    @property
    def stored_bytes(self) -> float:
        """Bytes that a token leaves in a store of policy sparse.

        Values are as wide as keys, or part of them.
        """
        return self.cache_width / self.score_width * stored_row_bytes(self.score_width)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of one layer."""

    num_experts: int
    num_chosen: int  # by each token
    expert_params: int
    router_params: int

    def expected_touched(self, num_tokens: int) -> float:
        """Return the expected number of different experts of `num_tokens` tokens, if equally likely."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)

    def most_touched(self, num_tokens: int) -> int:
        """Return the largest number of different experts that `num_tokens` tokens can choose."""
        return min(self.num_experts, self.num_chosen * num_tokens)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `ffn_params` are those that every token uses: a dense block, or shared experts."""

    attention: Attention
    ffn_params: int
    experts: Experts | None

    @property
    def num_params(self) -> int:
        experts = (
            self.experts.num_experts * self.experts.expert_params + self.experts.router_params
            if self.experts
            else 0
        )
        return self.attention.input_params + self.attention.output_params + self.ffn_params + experts

    @property
    def num_active_params(self) -> int:
        experts = (
            self.experts.num_chosen * self.experts.expert_params + self.experts.router_params
            if self.experts
            else 0
        )
        return self.attention.input_params + self.attention.output_params + self.ffn_params + experts


@dataclass(frozen=True)
class Model:
    """A decoder."""

    name: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    is_tied: bool
    layers: tuple[Layer, ...]
    precision: Precision

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The different layers, with the number of layers of each."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """The index in `kinds` of each layer."""
        indices = {layer: index for index, (layer, _) in enumerate(self.kinds)}
        return tuple(indices[layer] for layer in self.layers)

    @property
    def num_params(self) -> int:
        return sum(layer.num_params for layer in self.layers) + self.embedding_params * (
            1 if self.is_tied else 2
        )

    @property
    def num_active_params(self) -> int:
        """Parameters that a token is multiplied with."""
        return sum(layer.num_active_params for layer in self.layers) + self.embedding_params

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all parameters."""
        layers = sum(self.dense_bytes(layer) + self.expert_bytes(layer) for layer in self.layers)
        return layers + self.embedding_params * (1 if self.is_tied else 2) * self.precision.embedding

    def dense_bytes(self, layer: Layer) -> float:
        """Bytes of a layer's parameters that every step reads."""
        attention = layer.attention.input_params + layer.attention.output_params
        router = layer.experts.router_params if layer.experts else 0
        return (
            attention * self.precision.attention
            + layer.ffn_params * self.precision.ffn
            + router * self.precision.embedding
        )

    def expert_bytes(self, layer: Layer) -> float:
        """Bytes of a layer's routed experts."""
        return (
            layer.experts.num_experts * layer.experts.expert_params * self.precision.experts
            if layer.experts
            else 0.0
        )

    def cache_bytes(self, capacity: int) -> float:
        """Bytes of one sequence's slot of this capacity, all layers."""
        entries = sum(
            layer.attention.num_entries(capacity) * layer.attention.cache_width for layer in self.layers
        )
        return entries * self.precision.cache

    def stored_in(self, *, linear: float | None = None, cache: float | None = None) -> "Model":
        """Return the model with so many bytes a parameter of its linear layers and a cache element."""
        precision = self.precision
        if linear is not None:
            precision = replace(precision, attention=linear, ffn=linear, experts=linear)
        if cache is not None:
            precision = replace(precision, cache=cache)
        return replace(self, precision=precision)

    def check_context(self, num_tokens: int) -> None:
        """Raise ModelConfigError for a sequence longer than the model's."""
        if num_tokens > self.max_positions:
            raise ModelConfigError(
                f"a context must be at most {self.max_positions} tokens, the max_position_embeddings of "
                f"{self.name}, got {num_tokens}"
            )

    def decode_operations(self, context: int) -> float:
        """Return the operations of one token for this number of cache entries. A multiply-add counts two."""
        attention = sum(
            a.num_heads * a.decode_width * a.num_entries(context)
            for a in (layer.attention for layer in self.layers)
        )
        return 2.0 * (self.num_active_params + attention)


def model_names() -> tuple[str, ...]:
    """Return the names of the models that ship."""
    folder = files(__package__).joinpath(_DATA)
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    )


def load_model(name_or_path: str) -> Model:
    """Load a model by its name, or from a config.json or the folder that has one. Raises ModelConfigError."""
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return model_from_config(path.parent.name or path.stem, _parsed(path))
    if name_or_path not in model_names():
        raise ModelConfigError(
            f"no model {name_or_path!r}: there are {', '.join(model_names())}, and paths of config.json files"
        )
    return model_from_config(
        name_or_path, json.loads(files(__package__).joinpath(_DATA, f"{name_or_path}.json").read_text())
    )


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ModelConfigError(f"{path} is nested too deeply") from error


def model_from_config(name: str, config: dict[str, Any]) -> Model:
    """Return the model of a Hugging Face configuration.

    Raises ModelConfigError, which names the field, for a value that is missing or cannot be, and for layers
    that are not modelled.
    """
    try:
        text = {**config, **config.get("text_config", {})}
        _check(text)
        return Model(
            name=name,
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            max_positions=text.get("max_position_embeddings") or 4096,
            is_tied=text.get("tie_word_embeddings", False),
            layers=tuple(_layer(text, index) for index in range(text["num_hidden_layers"])),
            precision=_precision(text),
        )
    except KeyError as error:
        raise ModelConfigError(f"the configuration of {name} has no {error}") from error
    except ModelConfigError as error:
        raise ModelConfigError(f"the configuration of {name} is not modelled: {error}") from error
    except (AttributeError, TypeError) as error:
        raise ModelConfigError(f"the configuration of {name} is none of a decoder: {error}") from error


_MODEL_TYPES = frozenset(  # decoders of attention and gated feed-forward blocks
    {
        "deepseek_v2",
        "deepseek_v3",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gpt_oss",
        "granite",
        "llama",
        "llama4",
        "llama4_text",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
    "sliding_window_pattern",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "interleave_moe_layer_step",
    "decoder_sparse_step",
)
_COUNTS = (  # 0: the model has none
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
)
_MOST_LAYERS = 10_000
_LARGEST = 10**9


def _check(config: dict[str, Any]) -> None:
    """Raise ModelConfigError for a field that no decoder can have, or for layers that are not modelled."""
    kind = config.get("model_type")
    if kind not in _MODEL_TYPES:
        known = ", ".join(sorted(_MODEL_TYPES))
        raise ModelConfigError(f"model_type must be one of {known}, got {kind!r}")
    for key in _REQUIRED:
        _check_size(key, config[key], 1)
    for keys, least in ((_SIZES, 1), (_COUNTS, 0)):
        for key in keys:
            if config.get(key) is not None:
                _check_size(key, config[key], least)
    if config["num_hidden_layers"] > _MOST_LAYERS:
        raise ModelConfigError(f"num_hidden_layers must be at most {_MOST_LAYERS}, got more")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise ModelConfigError(f"num_key_value_heads must divide the {heads} heads, got {kv_heads}")
    if not config.get("head_dim") and not config.get("kv_lora_rank") and config["hidden_size"] % heads:
        raise ModelConfigError(f"hidden_size must be a multiple of the {heads} heads without head_dim")
    experts = _num_experts(config)
    if experts and not 1 <= config["num_experts_per_tok"] <= experts:
        chosen = config["num_experts_per_tok"]
        raise ModelConfigError(f"num_experts_per_tok must be at most {experts}, the experts, got {chosen}")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        raise ModelConfigError(
            f"tie_word_embeddings must be true or false, got {config['tie_word_embeddings']!r}"
        )
    types = config.get("layer_types")
    if types is not None:
        unknown = sorted({str(one) for one in types} - set(_LAYER_TYPES))
        if unknown:
            raise ModelConfigError(f"layer_types must be of {', '.join(_LAYER_TYPES)}, got {unknown[0]}")
        if len(types) != config["num_hidden_layers"]:
            layers = config["num_hidden_layers"]
            raise ModelConfigError(f"layer_types must have {layers} entries, one a layer, got {len(types)}")


def _check_size(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ModelConfigError(f"{key} must be a whole number of at least {least}, got {value!r}")


_DATA = "data/models"
_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "mxfp4": 4.25 / 8,
}  # mxfp4: 4 bits and a scale for 32
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}


def _precision(config: dict[str, Any]) -> Precision:
    base = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    width = _bytes("dtype", base)
    quantised = config.get("quantization_config") or {}
    method = quantised.get("quant_method")
    packed = _quantised_bytes(quantised, method) if method else width
    linear = width if method == "mxfp4" else packed
    return Precision(attention=linear, ffn=linear, experts=packed, embedding=width, cache=min(width, 2.0))


def _quantised_bytes(config: dict[str, Any], method: Any) -> float:
    """Return the bytes of a weight, its share of the scales included."""
    match method:
        case "awq" | "gptq":
            bits, group = config.get("bits", 4), config.get("group_size", 128)
        case "compressed-tensors":
            groups: dict[str, Any] = config.get("config_groups") or {}
            first: dict[str, Any] = (list(groups.values()) or [{}])[0].get("weights") or {}
            bits, group = first.get("num_bits"), first.get("group_size")
        case "bitsandbytes":
            bits, group = (4, 64) if config.get("load_in_4bit") else (8, None)
        case _:
            return _bytes("quantization_config.quant_method", method)
    if bits not in (2, 3, 4, 8, 16):
        raise ModelConfigError(f"quantization_config must say 2, 3, 4, 8 or 16 bits, got {bits!r}")
    if group is not None and (not isinstance(group, int) or group < -1 or group == 0):
        raise ModelConfigError(f"quantization_config.group_size must be a whole number, got {group!r}")
    return float(bits) / 8 + (2.0 / group if group is not None and group > 0 else 0.0)


def _bytes(key: str, name: Any) -> float:
    if name not in _BYTES:
        raise ModelConfigError(f"{key} must be one of {', '.join(_BYTES)}, got {name!r}")
    return _BYTES[name]


def _layer(config: dict[str, Any], index: int) -> Layer:
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _grouped_attention(config, index)
    if not _has_experts(config, index):
        size = config.get("intermediate_size_mlp") or config["intermediate_size"]
        return Layer(attention, 3 * config["hidden_size"] * size, None)
    expert_params = (
        3 * config["hidden_size"] * (config.get("moe_intermediate_size") or config["intermediate_size"])
    )
    experts = Experts(
        _num_experts(config),
        config["num_experts_per_tok"],
        expert_params,
        config["hidden_size"] * _num_experts(config),
    )
    shared = config.get("n_shared_experts", 0) * expert_params + 3 * config["hidden_size"] * config.get(
        "shared_expert_intermediate_size", 0
    )
    return Layer(attention, shared, experts)


def _num_experts(config: dict[str, Any]) -> int:
    return config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts") or 0


def _has_experts(config: dict[str, Any], index: int) -> bool:
    if (
        not _num_experts(config)
        or index < config.get("first_k_dense_replace", 0)
        or index in config.get("mlp_only_layers", ())
    ):
        return False
    step: int = config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1
    return (index + 1) % step == 0


def _grouped_attention(config: dict[str, Any], index: int) -> Attention:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return Attention(
        input_params=config["hidden_size"] * (num_heads + 2 * num_kv_heads) * head_dim,
        output_params=config["hidden_size"] * num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        cache_width=2 * num_kv_heads * head_dim,
        key_width=num_kv_heads * head_dim,
        expanded_width=2 * num_kv_heads * head_dim,
        prefill_width=2 * head_dim,
        decode_width=2 * head_dim,
        window=_window(config, index),
    )


def _window(config: dict[str, Any], index: int) -> int | None:
    window: int | None = config.get("sliding_window")
    if types := config.get("layer_types"):
        windows = {"sliding_attention": window, "chunked_attention": config.get("attention_chunk_size")}
        return windows.get(types[index])
    if window is None or not config.get("use_sliding_window", True):
        return None
    # Of so many layers, the last one sees everything.
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(config["model_type"])
    return None if pattern and (index + 1) % pattern == 0 else window


def _latent_attention(config: dict[str, Any]) -> Attention:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    query_rank = config.get("q_lora_rank")
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    return Attention(
        input_params=query + hidden * (rank + rope) + rank * heads * (nope + value),
        output_params=hidden * heads * value,
        num_heads=heads,
        num_kv_heads=1,
        cache_width=rank + rope,
        key_width=rank + rope,
        expanded_width=heads * (nope + rope + value),
        prefill_width=nope + rope + value,
        decode_width=rank + rope + rank,
    )

"""Loads published checkpoints. Models that cannot run on slots are refused by name, before any request."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from backends.torch_backend.config import DeviceName, DtypeName
from backends.torch_backend.errors import ModelLoadError, UnsupportedModelError
from backends.torch_backend.model.attention import ATTENTION_NAME, register_attention
from backends.torch_backend.model.checkpoint_weights import dequantized_weights
from backends.torch_backend.model.dequantization import layouts
from backends.torch_backend.model.language_model import (
    language_model,
    loaded_config,
    text_config,
    trimmed_class,
)
from backends.torch_backend.model.latent import LATENT_MODEL_TYPES
from backends.torch_backend.model.recurrent import RECURRENT_MODEL_TYPES

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
# Their frequencies depend on the longest sequence of a batch, so a request's keys would depend on other
# requests.
_REFUSED_ROPE_TYPES = {"dynamic"}


def load_model(name: str, device: DeviceName, dtype: DtypeName) -> PreTrainedModel:
    """Load a decoder from a folder or a hub id; of a model with several parts, the language model alone.

    It loads safetensors only and runs no code of the checkpoint. Raises ModelLoadError.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{name} has no configuration that transformers can read: {error}") from error
    check_config(config)
    quantization = quantization_of(config)
    config = loaded_config(config)
    model_class = decoder_class(config)
    target = resolve_device(device)
    weights_dtype = resolve_dtype(dtype, config, target, is_quantized=quantization is not None)
    register_attention()
    if not sys.stderr.isatty():
        # A progress bar would fill a log file.
        disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        source: dict[str, Any] = {"pretrained_model_name_or_path": name}
        if quantization is not None:
            _forget_quantization(config)
            stored = layouts(quantization, config.model_type)
            weights = dequantized_weights(name, stored, weights_dtype)
            source = {"pretrained_model_name_or_path": None, "state_dict": weights}
        loaded: Any = model_class.from_pretrained(
            **source,
            config=config,
            dtype=weights_dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with the weight's name
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error
    model, report = loaded
    check_weights(name, report)
    if text_config(config) is not config:
        model = language_model(model)
    ready: PreTrainedModel = model.to(target).eval()
    return ready


def check_config(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if a configuration says that slots cannot hold its model."""
    text = text_config(config)
    name = config.model_type
    quantization = quantization_of(config)
    if quantization is not None:
        layouts(quantization, name)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name}: encoder–decoder models are not supported")
    if getattr(text, "kv_lora_rank", None) is not None and text.model_type not in LATENT_MODEL_TYPES:
        supported = ", ".join(sorted(LATENT_MODEL_TYPES))
        raise UnsupportedModelError(f"{name}: multi-head latent attention is supported for {supported} only")
    if "shared" in (getattr(text, "indexer_types", None) or ()):
        # Layers evict different tokens, so that no layer can use another one's choice of entries.
        raise UnsupportedModelError(f"{name}: layers that share the choice of an indexer are not supported")
    other_layers = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if other_layers and text.model_type not in RECURRENT_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{name}: layers of type {', '.join(sorted(other_layers))} are not supported for this model type"
        )
    refused = _rope_types(text) & _REFUSED_ROPE_TYPES
    if refused:
        raise UnsupportedModelError(
            f"{name}: rope type {', '.join(sorted(refused))} is not supported: "
            "its keys depend on the whole batch"
        )


def quantization_of(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return how a checkpoint was quantised, as its configuration says; None for one that was not."""
    for each in (config, text_config(config)):
        found: Mapping[str, Any] | None = getattr(each, "quantization_config", None)
        if found is not None:
            return found
    return None


def _forget_quantization(config: PreTrainedConfig) -> None:
    """Let transformers load the dequantised weights as any others."""
    for each in (config, text_config(config)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the types of all rotary embeddings: some models have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [group for group in parameters.values() if isinstance(group, dict)] or [parameters]
    return {group.get("rope_type", "default") for group in groups}


def decoder_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the model's class. Raises UnsupportedModelError for one that cannot run on slots."""
    if text_config(config) is not config:
        model_class: Any = trimmed_class(config)
    else:
        # A type that is published as a part of others may be in the other map only.
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(
            type(config), None
        ) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModelError(f"{config.model_type}: transformers has no decoder of this type")
    # Classes of hybrid models do not declare that they take one, though their attention layers do.
    is_recurrent = text_config(config).model_type in RECURRENT_MODEL_TYPES
    if not is_recurrent and not model_class.is_backend_compatible():
        raise UnsupportedModelError(
            f"{config.model_type}: {model_class.__name__} takes no attention function from outside"
        )
    if not is_recurrent and model_class._is_stateful:
        raise UnsupportedModelError(
            f"{config.model_type}: {model_class.__name__} keeps a state that is not keys and values"
        )
    chosen: type[PreTrainedModel] = model_class
    return chosen


def check_weights(name: str, report: dict[str, set[object]]) -> None:
    """Raise ModelLoadError for missing weights. transformers would continue with random numbers."""
    broken = sorted(str(key) for problem in ("missing_keys", "mismatched_keys") for key in report[problem])
    if broken:
        raise ModelLoadError(
            f"{name} lacks {len(broken)} of its model's weights, or has them in another shape: "
            f"{', '.join(broken[:4])}"
        )


def resolve_device(device: DeviceName) -> torch.device:
    """Return the device. Raises ModelLoadError if CUDA is requested and not available."""
    if device is DeviceName.CUDA and not torch.cuda.is_available():
        raise ModelLoadError("--device cuda requires a CUDA device, and torch finds none")
    if device is DeviceName.AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def resolve_dtype(
    dtype: DtypeName, config: PreTrainedConfig, device: torch.device, *, is_quantized: bool = False
) -> torch.dtype:
    """Return the dtype of weights and activations."""
    stored = config.dtype or text_config(config).dtype or ("bfloat16" if is_quantized else "float32")
    name = str(stored).removeprefix("torch.") if dtype is DtypeName.AUTO else dtype.value
    if dtype is DtypeName.AUTO and name == "float16" and device.type == "cpu":
        # Weights of 4 or 8 bits lose less by rounding to bfloat16 than they lost before.
        name = "bfloat16" if is_quantized else "float32"
    chosen: torch.dtype = getattr(torch, name)
    return chosen

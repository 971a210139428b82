"""What a model cannot do that its config wants: refused before slots are allocated."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from backends.torch_backend.config import TorchBackendConfig
from backends.torch_backend.model.probe import LayerSpec
from cache.policy import PolicyName
from cache.pool_options import KVCacheDtype
from cache.token_store import STORED_TOGETHER

logger = logging.getLogger(__name__)


def check_cache_dtypes(
    config: TorchBackendConfig, layers: Sequence[LayerSpec], model: PreTrainedModel
) -> None:
    """Raise ValueError for latents in 8 bits, and for slots in fp8 on a processor, whose kernels read int8.

    A latent and its rotary key differ in size by far, and would share a scale.
    """
    dtypes = [options.kv_cache_dtype for options in config.pools]
    named = [("kv_cache_dtype", dtype) for dtype in dtypes]
    if config.prefix_cache_bytes != 0:
        named.append(("prefix_cache_dtype", config.prefix_cache_dtype))
    for name, dtype in named:
        if dtype.is_rounded and any(len(layer.planes) == 1 for layer in layers):
            raise ValueError(
                f"{name} must be auto for a model that caches latents ({model.config.model_type}), "
                f"got {dtype}"
            )
    if KVCacheDtype.FP8 in dtypes and model.device.type == "cpu":
        raise ValueError("kv_cache_dtype fp8 needs device cuda, got cpu; int8 takes as little memory")


def check_stores(config: TorchBackendConfig, layers: Sequence[LayerSpec], model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose tokens older than the ring cannot be stored."""
    if not any(options.policy.name is PolicyName.SPARSE for options in config.pools):
        return
    if getattr(model.config, "index_topk", None) is not None:
        raise ValueError(
            f"policy {PolicyName.SPARSE} is not for {model.config.model_type}: its own indexer chooses "
            "entries, and would see no stored tokens"
        )
    widths = [plane.width for layer in layers for plane in layer.planes]
    if any(width % STORED_TOGETHER for width in widths):
        raise ValueError(
            f"policy {PolicyName.SPARSE} needs keys and values whose width is a multiple of "
            f"{STORED_TOGETHER}, got {min(widths)}"
        )


def without_prefixes(
    config: TorchBackendConfig, layers: Sequence[LayerSpec], model_type: str
) -> TorchBackendConfig:
    """Return the config without stored prompts for a model whose layers have states: a block has none.

    Raises ValueError if they are configured.
    """
    if not any(layer.states for layer in layers):
        return config
    if config.prefix_cache_bytes or config.prefix_cache_dir is not None:
        raise ValueError(
            f"prefix_cache_bytes must be 0, without prefix_cache_dir, for a model with recurrent layers "
            f"({model_type}): blocks of stored prompts hold no states; got {config.prefix_cache_bytes}"
        )
    if config.prefix_cache_bytes is None:
        logger.info("prompts are not stored for later ones: %s has recurrent layers", model_type)
    return replace(config, prefix_cache_bytes=0)


def check_draft(config: TorchBackendConfig, layers: Sequence[LayerSpec], max_model_len: int) -> None:
    """Raise ValueError for a draft without a layer that sees the whole prompt."""
    windows = [layer.sliding_window for layer in layers if layer.attends]
    if config.is_draft and all(window is not None and window < max_model_len for window in windows):
        raise ValueError(f"the draft {config.model} sees only its last {windows[0]} tokens in each layer")

"""Models whose attention depends on how long sequences may become.

The scaling longrope has one set of rotary frequencies for short sequences and one for long ones. transformers
chooses by the longest sequence of each batch, so that a request's keys would depend on other requests, and
change while it grows. Here the server's maximum length chooses, once.
"""

import logging
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)

_LONGROPE = "longrope"


def longest_sequence(config: PreTrainedConfig) -> int:
    """Return the longest sequence that a model can have.

    Llama 4 attends within chunks, and its layers without rotary positions scale queries by their position.
    Within its first chunk, these are full attention and a factor of 1.
    """
    limits: list[int] = [config.max_position_embeddings]
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(config.attention_chunk_size)
        if getattr(config, "attn_temperature_tuning", False):
            limits.append(int(config.floor_scale))
    return min(limits)


def settle_frequencies(model: PreTrainedModel, max_model_len: int) -> str:
    """Give rotary embeddings with longrope the frequencies for sequences of up to `max_model_len` tokens.

    Return which ones they are, "short" or "long", on which keys depend; "" for a model without longrope.
    """
    settled = ""
    for module in model.modules():
        if getattr(module, "rope_type", None) == _LONGROPE:
            settled = _settle(module, model.config, max_model_len)
    return settled


def _settle(rotary: Any, config: PreTrainedConfig, max_model_len: int) -> str:
    original: int = config.rope_parameters["original_max_position_embeddings"]
    device = rotary.inv_freq.device
    frequencies, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](config, device, seq_len=max_model_len)
    with torch.no_grad():
        rotary.inv_freq.copy_(frequencies)
    rotary.rope_type = "default"  # transformers chooses anew for no other type
    settled = "long" if max_model_len > original else "short"
    logger.info(
        "longrope: the factors for %s sequences are used, as max_model_len %d is %s %d",
        settled,
        max_model_len,
        "more than" if max_model_len > original else "at most",
        original,
    )
    return settled

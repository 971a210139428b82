"""The language model of a checkpoint that has other parts too, for images or sound.

transformers knows how such a checkpoint names its weights, so its class of the whole model loads them. The
other parts are removed before the weights are read: what no module takes is not read from the files.
"""

import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from backends.torch_backend.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

# Types whose language model transformers loads from the files of the whole model. Their other parts need
# packages even to be built.
_LOADED_ALONE = frozenset({"gemma3n"})


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model's decoder of text, which is `config` itself without other parts."""
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    return found


def loaded_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration by which a checkpoint is loaded: that of its text for a few types."""
    if config.model_type not in _LOADED_ALONE:
        return config
    logger.info("%s: the language model alone is loaded and served", config.model_type)
    text = text_config(config)
    text.dtype = text.dtype or config.dtype
    return text


def trimmed_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a model with several parts, whose instances have the language model alone.

    Raises UnsupportedModelError if transformers has no such class that generates text.
    """
    # Some multimodal types are in the map of decoders too: with the class of their language model, which
    # would not find its weights, or with the class of the whole.
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        whole: Any = mapping.get(type(config), None)
        if whole is not None:
            break
    if whole is None or not issubclass(whole, GenerationMixin):
        raise UnsupportedModelError(
            f"{config.model_type}: transformers has no model of this type that writes text"
        )

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        _remove_other_parts(self)

    # transformers finds the mapping of weights' names by the name of the class and of its module.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model of a loaded instance of a trimmed class, as a model of its own.

    Raises UnsupportedModelError if it has weights beside its decoder and its output layer.
    """
    config = text_config(model.config)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder.get_output_embeddings() is not None:
        return _checked(decoder, config)
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None:
        built: PreTrainedModel = _LanguageModel(config)
    else:
        with torch.device("meta"):
            built = known(config)
    setattr(built, built.base_model_prefix, decoder)
    built.set_output_embeddings(model.get_output_embeddings())  # type: ignore[no-untyped-call]
    built.generation_config = model.generation_config
    return _checked(built, config)


class _LanguageModel(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A decoder and its output layer, for decoders of which transformers has no such class."""

    base_model_prefix = "model"
    _supports_attention_backend = True

    model: Any
    lm_head: nn.Module

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Identity()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # its decoder decides

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(self, *, logits_to_keep: int = 0, **kwargs: Any) -> CausalLMOutputWithPast:
        """Return the logits [row, token, vocabulary] of each row's last `logits_to_keep` tokens; 0: all."""
        hidden: Tensor = self.model(**kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))


def _remove_other_parts(model: PreTrainedModel) -> None:
    """Remove all modules but the decoder and the output layer.

    Single weights beside them stay: transformers initialises some by name.
    """
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    kept = {decoder, model.get_output_embeddings()}  # type: ignore[no-untyped-call]
    removed = list(_remove_others(model, "", kept))
    logger.info(
        "%s: the language model alone is loaded and served, without %s",
        model.config.model_type, ", ".join(name.rpartition(".")[2] for name in removed) or "other parts",
    )  # fmt: skip
    # Their weights in the files are no mistake to be reported.
    ignored = {rf"^{re.escape(name)}(\.|$)" for name in removed}
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}


def _remove_others(module: nn.Module, prefix: str, kept: set[nn.Module]) -> Iterator[str]:
    """Remove the modules beside the kept ones; yield the removed parts' names."""
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
            yield f"{prefix}{name}"
        else:
            yield from _remove_others(child, f"{prefix}{name}.", kept)


def _checked(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Raise UnsupportedModelError for weights that were not loaded."""
    missing = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    if missing:
        raise UnsupportedModelError(
            f"{config.model_type}: the language model has weights that its checkpoint gives another part: "
            f"{', '.join(missing[:4])}"
        )
    return model

"""A model that is loaded and probed, with modules that use slots and the kernels in place of its own."""

import gc
import logging
from dataclasses import dataclass

from transformers import PreTrainedModel

from backends.torch_backend.config import Quantization, TorchBackendConfig
from backends.torch_backend.memory import fitting_length
from backends.torch_backend.model.allocation import returning_memory
from backends.torch_backend.model.experts import has_experts, replace_experts
from backends.torch_backend.model.fingerprint import fingerprint, sampled_fingerprint
from backends.torch_backend.model.latent import replace_latent_attention
from backends.torch_backend.model.layer_types import order_layer_types
from backends.torch_backend.model.lengths import settle_frequencies
from backends.torch_backend.model.linear import KINDS, replace_all_linears
from backends.torch_backend.model.loading import load_model
from backends.torch_backend.model.probe import LayerSpec, probe_layers
from backends.torch_backend.model.recurrent import replace_recurrent_mixers
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.prefix_store import BLOCK_TOKENS
from backends.torch_backend.spec import resolve_max_model_len

logger = logging.getLogger(__name__)

# What quantization rounds beside linear layers; stored prompts of other numbers are of another model.
_ROUNDED = "experts-2"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """`fingerprint` names the numbers of its keys and values, where prompts are archived. `scores_name` names
    them by samples of the weights, where a policy measures layers.
    """

    model: PreTrainedModel
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    num_parameters: int
    fingerprint: str
    scores_name: str


def prepare_model(
    config: TorchBackendConfig, kernels: Kernels, model: PreTrainedModel | None, *, has_recorder: bool
) -> PreparedModel:
    """Load the config's model, or take this one, and replace its modules.

    With `has_recorder`, its steps are recorded on a CPU too. Raises ModelLoadError for a model that cannot
    be served, and ValueError for sizes that do not fit together.
    """
    with returning_memory():
        model = model or load_model(config.model, config.device, config.dtype)
        device = model.device
        num_parameters = model.num_parameters()
        max_model_len = resolve_max_model_len(config, model.config)
        # Of the weights as they were loaded, which the next lines replace.
        is_archived = config.prefix_cache_dir is not None
        facts = (config.quantization, _ROUNDED, BLOCK_TOKENS)
        name = fingerprint(model, *facts) if is_archived else ""
        measures_layers = any(options.policy.measures_layers for options in config.pools)
        scores_name = sampled_fingerprint(model, config.quantization, _ROUNDED) if measures_layers else ""
        order_layer_types(model)
        replace_latent_attention(model)
        replace_recurrent_mixers(model)
        layers = probe_layers(model)
        gc.collect()  # before memory is read: a server that loads collects nothing
        if config.max_model_len is None:
            max_model_len = fitting_length(config, layers, max_model_len, device)
        settled = settle_frequencies(model, max_model_len)
        # Which operations replaced experts run depends on the choice of experts: no step is recorded.
        if device.type == "cpu" and not has_recorder:
            replace_experts(model, kernels, config.quantization)
        elif config.quantization is not Quantization.NONE and has_experts(model):
            logger.warning("only a CPU has experts in %s: here they keep their type", config.quantization)
        replace_all_linears(model, kernels, KINDS[config.quantization])
    return PreparedModel(model, layers, max_model_len, num_parameters, name + settled, scores_name + settled)

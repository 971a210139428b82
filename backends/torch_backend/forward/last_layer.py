"""A model's last layer while a prompt is read: keys and values of all tokens, outputs of only the last few.

A token is drawn from the last layer's output for the prompt's last token, and votes come from the queries of
its last tokens. The other tokens are finished once their keys and values are in the cache: the layer's
attention and feed-forward part are skipped for them.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.stand_in import LayerCall, StandIn, decoder_layers
from backends.torch_backend.forward.step import PromptStep, ScratchStep


class LastLayer(StandIn):
    """Runs its layer for the last tokens of each row as far as they are needed; other states pass through."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["slot_cache"]
        step = cache.step if isinstance(cache, ModelCache) else None
        num_last = _num_last(cache, step) if isinstance(step, PromptStep) else None
        if not isinstance(step, PromptStep) or num_last is None:
            return self.layer(*args, **kwargs)
        call = LayerCall(args, kwargs)
        tensors = call.tensors()
        hidden = tensors[0]
        chunk = step.kinds[0].entries.shape  # [row, token]
        # Half of a chunk or more is not worth two calls. Some models hand on their tokens' states in another
        # shape.
        if hidden.shape[:2] != chunk or chunk[1] <= 2 * num_last:
            return self.layer(*args, **kwargs)
        last = call.replaced(
            [
                tensor[:, -num_last:].contiguous() if tensor.shape[:2] == chunk else tensor
                for tensor in tensors
            ]
        )
        with cache.stopping_after_write():
            self.layer(*args, **kwargs)
        with cache.during(step.of_last(num_last)):
            output = self.layer(*last.args, **last.kwargs)
        return _joined(hidden[:, :-num_last], output)


def shorten_last_layer(model: PreTrainedModel) -> None:
    """Replace the last of the model's decoder layers by a `LastLayer`."""
    layers = decoder_layers(model)
    if layers and not isinstance(layers[-1], LastLayer):
        layers[-1] = LastLayer(layers[-1])


def _num_last(cache: ModelCache, step: PromptStep) -> int | None:
    """Return how many of each row's last tokens are read from or vote in the last layer; None: all count."""
    if step.num_outputs is None:
        return None
    scorer = cache.layers[-1].kind.scorer
    if scorer is not None and isinstance(step, ScratchStep) and step.observations:
        return max(step.num_outputs, scorer.observation_window)
    return step.num_outputs


def _joined(others: Tensor, output: Any) -> Any:
    """Put other tokens' states before a layer's output: models may count on as many tokens as they passed."""
    if isinstance(output, tuple):
        return _joined(others, output[0]), *output[1:]
    return torch.cat([others, output], dim=1)

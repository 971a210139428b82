"""A model's last layer while a prompt is read: its keys and values are wanted of all tokens, what it returns of the last few.

Tokens are drawn from what the last layer makes of a prompt's last token, and votes come from its last tokens' queries. The others have
been read once their keys and values are in the cache: they need neither the layer's attention nor what follows it.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.torch_backend.forward.cache import ModelCache, Step, WrittenError
from backends.torch_backend.forward.stand_in import LayerCall, StandIn, decoder_layers


class LastLayer(StandIn):
    """Returns what its layer makes of each row's last tokens, as far as they count; the others come back as they were."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["slot_cache"]
        step = cache.step if isinstance(cache, ModelCache) else None
        num_last = None if step is None else _num_last(cache, step)
        if step is None or num_last is None:
            return self.layer(*args, **kwargs)
        call, chunk = LayerCall(args, kwargs), step.kinds[0].entries.shape  # [row, token]
        hidden, *_ = tensors = call.tensors()
        # With twice as many there is little to win. Some models hand on their tokens' states in other shapes.
        if hidden.shape[:2] != chunk or chunk[1] <= 2 * num_last:
            return self.layer(*args, **kwargs)
        last = call.replaced(
            [
                tensor[:, -num_last:].contiguous() if tensor.shape[:2] == chunk else tensor
                for tensor in tensors
            ]
        )
        try:
            cache.step = replace(step, only_writes=True)
            with suppress(WrittenError):
                self.layer(*args, **kwargs)
            cache.step = step.of_last(num_last)
            return _joined(hidden[:, :-num_last], self.layer(*last.args, **last.kwargs))
        finally:
            cache.step = step


def shorten_last_layer(model: PreTrainedModel) -> None:
    """Let the last of the model's decoder layers do no more than a step asks for."""
    layers = decoder_layers(model)
    if layers and not isinstance(layers[-1], LastLayer):
        layers[-1] = LastLayer(layers[-1])


def _num_last(cache: ModelCache, step: Step) -> int | None:
    """Return how many of each row's last tokens are drawn from or vote in the last layer; None: all count."""
    chooser = cache.layers[-1].kind.chooser
    num_voting = chooser.observation_window if chooser is not None and step.observations else 0
    return None if step.num_asked is None else max(step.num_asked, num_voting)


def _joined(others: Tensor, output: Any) -> Any:
    """Put other tokens' states before what a layer has returned, since models may count on as many tokens as they were given."""
    if isinstance(output, tuple):
        return _joined(others, output[0]), *output[1:]
    return torch.cat([others, output], dim=1)

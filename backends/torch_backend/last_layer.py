"""A model's last layer while a prompt is read: its keys and values are wanted of all tokens, what it returns of the last few.

Tokens are drawn from what the last layer makes of a prompt's last token, and votes come from its last tokens' queries. The others have
been read once their keys and values are in the cache: they need neither the layer's attention nor what follows it.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from backends.torch_backend.layer_calls import LayerCall, StandIn, decoder_layers
from backends.torch_backend.model_cache import ModelCache, WrittenError


class LastLayer(StandIn):
    """Returns what its layer makes of each row's last tokens, as many as the step asks for."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: ModelCache = kwargs["slot_cache"]
        step, call = cache.step, LayerCall(args, kwargs)
        if step is None or step.num_asked is None:
            return self.layer(*args, **kwargs)
        tensors, num_asked, chunk = call.tensors(), step.num_asked, step.kinds[0].entries.shape  # [row, token]
        if tensors[0].shape[:2] != chunk or chunk[1] <= num_asked:
            return self.layer(*args, **kwargs)
        last = call.replaced([tensor[:, -num_asked:].contiguous() if tensor.shape[:2] == chunk else tensor for tensor in tensors])
        try:
            cache.step = replace(step, only_writes=True)
            with suppress(WrittenError):
                self.layer(*args, **kwargs)
            cache.step = step.of_last(num_asked)
            return self.layer(*last.args, **last.kwargs)
        finally:
            cache.step = step


def shorten_last_layer(model: PreTrainedModel) -> None:
    """Let the last of the model's decoder layers return what a step asks for, and no more."""
    layers = decoder_layers(model)
    if layers:
        layers[-1] = LastLayer(layers[-1])

"""How the model calls a decoder layer, and modules that replace one. Nothing here traces or compiles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.forward.cache import ModelCache


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments with which the model calls a layer."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, in order, also those inside tuples."""
        return [tensor.contiguous() for tensor in _tensors((*self.args, *self.kwargs.values()))]

    def replaced(self, tensors: Sequence[Tensor], cache: object = None) -> "LayerCall":
        """Return the call with other tensors, in the order of `tensors()`, and with `cache` unless None."""
        remaining = iter(tensors)
        args = _substituted(self.args, remaining, cache)
        values = _substituted(tuple(self.kwargs.values()), remaining, cache)
        return LayerCall(args, dict(zip(self.kwargs, values, strict=True)))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _substituted(value: Any, tensors: Iterator[Tensor], cache: object) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_substituted(item, tensors, cache) for item in value)
    return cache if cache is not None and isinstance(value, ModelCache) else value


class StandIn(nn.Module):
    """Replaces a decoder layer in the model, and has the attributes of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's list of decoder layers, or an empty list. Its items may be replaced."""
    num_layers = model.config.num_hidden_layers
    return next(
        (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers), nn.ModuleList()
    )

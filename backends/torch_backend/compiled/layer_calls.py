"""A model's layer as a function of its tensors: how it is called, and how such a call is traced for all layers that are built alike."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.compiled.trace import GraphSource, InputSpec, trace
from backends.torch_backend.forward.cache import ModelCache

_NUMBER = "layer_idx"
_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How the model calls a layer."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        return [tensor.contiguous() for tensor in _tensors((*self.args, *self.kwargs.values()))]

    def replaced(self, tensors: Sequence[Tensor], cache: object = None) -> "LayerCall":
        """Return the call with other tensors in their places, and another cache, if there is one."""
        given = iter(tensors)
        args, values = (_substituted(value, given, cache) for value in (self.args, tuple(self.kwargs.values())))
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
    """Stands where a decoder layer stood, and has its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's list of its decoder layers, whose items may be replaced; an empty one if it has none."""
    num_layers = model.config.num_hidden_layers
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers), nn.ModuleList())


class TracedCache:
    """The cache that a layer meets while it is traced: its update leaves all to the attention."""

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value


class LayerFunction:
    """A layer with its weights among its inputs."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        named = dict(layer.named_parameters()) | dict(layer.named_buffers())
        self._names, self.weights = list(named), [weight.detach() for weight in named.values()]

    def structure(self, inputs: Sequence[Tensor]) -> Hashable:
        """Return all that tells one layer's graph from another's, but for what they do with their numbers."""
        modules = [
            (name, type(module), *((key, value) for key, value in vars(module).items() if isinstance(value, _SIMPLE) and key != _NUMBER))
            for name, module in self._layer.named_modules()
        ]
        return tuple(modules), tuple(self._names), tuple((tensor.shape, tensor.dtype) for tensor in (*inputs, *self.weights))

    def trace(
        self, call: LayerCall, given: Sequence[InputSpec], own: Sequence[InputSpec], cache: Callable[..., TracedCache]
    ) -> GraphSource:
        """Return the graph of a call, whose inputs are the call's tensors, `own`, of which the `cache` it meets is made, and the weights.

        Raises GraphError.
        """
        first_own, first_weight = len(given), len(given) + len(own)

        def run(*tensors: Tensor) -> object:
            replaced = call.replaced(tensors[:first_own], cache(*tensors[first_own:first_weight]))
            weights = dict(zip(self._names, tensors[first_weight:], strict=True))
            return torch.func.functional_call(self._layer, weights, replaced.args, dict(replaced.kwargs), tie_weights=False)

        with _unnumbered(self._layer):
            return trace(run, [*given, *own, *map(InputSpec.of, self.weights)])


class _Unknown:
    """A layer's number while its graph is traced, which must hold for others too: it can be handed on, and nothing else."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the layer asks for its number")

    __eq__ = __hash__ = __bool__ = __index__ = _refuse


@contextmanager
def _unnumbered(layer: nn.Module) -> Iterator[None]:
    numbered = [(module, vars(module)[_NUMBER]) for module in layer.modules() if _NUMBER in vars(module)]
    try:
        for module, _ in numbered:
            setattr(module, _NUMBER, _Unknown())
        yield
    finally:
        for module, number in numbered:
            setattr(module, _NUMBER, number)

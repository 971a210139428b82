"""A model's decoder layers as static graphs: a decode step runs a layer's graph once there is one, everything else the layer itself.

Layers that are built alike share one graph, which is traced and compiled once and called with each layer's weights and slots. A layer
that cannot be traced, such as one whose experts are chosen by value or that asks which layer it is, stays as it is.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.attention import AttentionOptions
from backends.torch_backend.graphs import Compiled, GraphError, GraphSource, InputSpec, trace
from backends.torch_backend.kernels import MAX_ROWS, Kernels, slot_attention
from backends.torch_backend.model_cache import KindStep, ModelCache

logger = logging.getLogger(__name__)

_NUMBER = "layer_idx"
_SIMPLE = (bool, int, float, str, type(None))
_ROW, _PLAN, _PLANE = ("rows",), ("rows", None, "entries"), ("slots", None, "capacity")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How the model calls a layer, in a decode step."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: KindStep
    planes: tuple[Tensor, ...]

    def tensors(self) -> list[Tensor]:
        return [tensor.contiguous() for tensor in _tensors((*self.args, *self.kwargs.values()))]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _substituted(value: Any, slots: "_TracedSlots", tensors: Iterator[Tensor]) -> Any:
    """Return an argument with other tensors and another cache in its places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(_substituted(item, slots, tensors) for item in value)
    return slots if isinstance(value, ModelCache) else value


class _Unknown:
    """A layer's number while its graph is traced, which must hold for others too: it can be handed on, and nothing else."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the layer asks for its number")

    __eq__ = __hash__ = __bool__ = __index__ = _refuse


@dataclass(frozen=True, slots=True)
class _TracedSlots:
    """The cache that a layer meets while it is traced: its update leaves all to the attention."""

    entries: Tensor
    bias: Tensor
    planes: tuple[Tensor, ...]

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:  # noqa: ARG002
        scaling, softcap, sinks = options.scaling, options.softcap, options.sinks
        return slot_attention(query, key, value, self.planes, self.entries, self.bias, scaling=scaling, softcap=softcap, sinks=sinks)


class GraphedLayer(nn.Module):
    """Stands where a decoder layer stood, and has its attributes.

    Pools of one slot have a graph of their own: of one row, operations are other ones.
    """

    def __init__(self, layer: nn.Module, number: int, kernels: Kernels) -> None:
        super().__init__()
        self.layer = layer
        self.sources: dict[bool, GraphSource] = {}  # by whether there is one slot
        self.graphs: dict[bool, Compiled] = {}
        self._number, self._kernels = number, kernels
        named = dict(layer.named_parameters()) | dict(layer.named_buffers())
        self._names, self.weights = list(named), [weight.detach() for weight in named.values()]
        self.calls: dict[bool, LayerCall] = {}
        self.stand_in: Callable[[LayerCall], object] | None = None  # is called instead while the step around the layers is traced

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: ModelCache = kwargs["slot_cache"]
        step = cache.step
        if step is None or not step.reads_first:
            return self.layer(*args, **kwargs)
        own = cache.layers[self._number]
        call = LayerCall(args, kwargs, step.kinds[own.kind_index], own.slots.planes)
        if self.stand_in is not None:
            return self.stand_in(call)
        is_single = own.slots.planes[0].shape[0] == 1
        graph = self.graphs.get(is_single)
        if graph is None or len(step.places) > MAX_ROWS:
            self.calls[is_single] = call
            return self.layer(*args, **kwargs)
        return graph(*self._inputs(call))[0]

    def _inputs(self, call: LayerCall) -> list[Tensor]:
        return [*call.tensors(), call.kind.entries.contiguous(), call.kind.bias.contiguous(), *call.planes, *self.weights]

    def structure(self, call: LayerCall) -> Hashable:
        """Return all that tells one layer's graph from another's, but for what they do with their numbers."""
        modules = [
            (name, type(module), *((key, value) for key, value in vars(module).items() if isinstance(value, _SIMPLE) and key != _NUMBER))
            for name, module in self.layer.named_modules()
        ]
        return tuple(modules), tuple(self._names), tuple((tensor.shape, tensor.dtype) for tensor in self._inputs(call))

    def trace(self, call: LayerCall) -> GraphSource:
        """Return the graph of a decode step's call. Raises GraphError."""
        if len(call.planes) != 2:
            raise GraphError("it holds latents instead of keys and values")
        inputs = self._inputs(call)
        num_given, num_rows = len(call.tensors()), inputs[0].shape[0]
        first_weight = num_given + 4
        names: list[tuple[str | None, ...]] = [_ROW if tensor.shape[0] == num_rows else () for tensor in inputs[:num_given]]
        names += [_ROW, _PLAN, _PLANE, _PLANE, *[()] * len(self.weights)]

        def run(*tensors: Tensor) -> object:
            entries, bias, keys, values = tensors[num_given:first_weight]
            slots, given = _TracedSlots(entries, bias, (keys, values)), iter(tensors)
            args, values = (_substituted(value, slots, given) for value in (call.args, tuple(call.kwargs.values())))
            weights = dict(zip(self._names, tensors[first_weight:], strict=True))
            kwargs = dict(zip(call.kwargs, values, strict=True))
            return torch.func.functional_call(self.layer, weights, args, kwargs, tie_weights=False)

        with _unnumbered(self.layer), self._kernels.used():
            return trace(run, [InputSpec.of(tensor, name) for tensor, name in zip(inputs, names, strict=True)])


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


class LayerGraphs:
    """The layers of a model that may run as graphs."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        num_layers = model.config.num_hidden_layers
        layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers), nn.ModuleList())
        self.layers = [GraphedLayer(layer, number, kernels) for number, layer in enumerate(layers)]
        for number, layer in enumerate(self.layers):
            layers[number] = layer

    def trace(self) -> dict[str, GraphSource]:
        """Return the different graphs of the layers by their keys. A decode step has been run in each pool."""
        alike: dict[Hashable, list[tuple[GraphedLayer, bool]]] = {}
        for layer in self.layers:
            for is_single, call in layer.calls.items():
                alike.setdefault(layer.structure(call), []).append((layer, is_single))
        sources: dict[str, GraphSource] = {}
        for users in alike.values():
            layer, is_single = users[0]
            try:
                source = layer.trace(layer.calls[is_single])
            except GraphError as error:
                logger.info("%d of %d layers have no graph: %s", len(users), len(self.layers), str(error).splitlines()[0])
                continue
            sources[source.key] = source
            for layer, is_single in users:
                layer.sources[is_single] = source
        return sources

    def use(self, graphs: Mapping[str, Compiled]) -> None:
        """Let the layers run these graphs from the next step on."""
        for layer in self.layers:
            layer.graphs |= {is_single: graphs[source.key] for is_single, source in layer.sources.items() if source.key in graphs}

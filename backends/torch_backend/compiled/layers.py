"""A model's decoder layers as static graphs: decode steps, and chunks of prompts, run a layer's graph once there is one, not the layer.

Layers that are built alike share one graph, which is traced and compiled once and called with each layer's weights and slots. A layer
that cannot be traced, such as one whose experts are chosen by value or that asks which layer it is, stays as it is.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.compiled.chunks import ChunkAttention, ChunkCode, chunk_code
from backends.torch_backend.compiled.layer_calls import LayerFunction, TracedCache
from backends.torch_backend.compiled.trace import Compiled, GraphError, GraphSource, InputSpec
from backends.torch_backend.forward.cache import KindStep, ModelCache
from backends.torch_backend.forward.stand_in import LayerCall, StandIn, decoder_layers
from backends.torch_backend.model.attention import AttentionOptions
from backends.torch_backend.native.kernels import Kernels, slot_attention

logger = logging.getLogger(__name__)

_ROW, _PLAN, _PLANE = ("rows",), ("rows", None, "entries"), ("slots", None, "capacity")


@dataclass(frozen=True, slots=True)
class StepCall:
    """How the model calls a layer in a decode step, and what the layer has there of its own."""

    given: LayerCall
    kind: KindStep
    planes: tuple[Tensor, ...]

    def inputs(self) -> list[Tensor]:
        return [
            *self.given.tensors(),
            self.kind.entries.contiguous(),
            self.kind.bias.contiguous(),
            *self.planes,
        ]


@dataclass(frozen=True, slots=True)
class _TracedSlots(TracedCache):
    entries: Tensor
    bias: Tensor
    planes: tuple[Tensor, ...]

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        scaling, softcap, sinks = options.scaling, options.softcap, options.sinks
        return slot_attention(
            query,
            key,
            value,
            self.planes,
            self.entries,
            self.bias,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )


class GraphedLayer(StandIn):
    """A layer with its graphs. Pools of one slot have a graph of their own: of one row, operations are other ones."""

    def __init__(self, layer: nn.Module, number: int, kernels: Kernels) -> None:
        super().__init__(layer)
        self.sources: dict[bool, GraphSource] = {}  # by whether there is one slot
        self.graphs: dict[bool, Compiled] = {}
        self.function = LayerFunction(layer)
        self._number, self._kernels = number, kernels
        self.calls: dict[bool, StepCall] = {}
        self.chunk_call: LayerCall | None = (
            None  # with the most rows so far, so that it shows what every row has of its own
        )
        self.chunk: ChunkCode | None = None
        self.stand_in: Callable[[StepCall], object] | None = (
            None  # is called instead while the step around the layers is traced
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: ModelCache = kwargs["slot_cache"]
        step, given = cache.step, LayerCall(args, kwargs)
        if step is None or not step.reads_first:
            return self._read(cache, given)
        own = cache.layers[self._number]
        call = StepCall(given, step.kinds[own.kind_index], own.slots.planes)
        if self.stand_in is not None:
            return self.stand_in(call)
        is_single = own.slots.planes[0].shape[0] == 1
        graph = self.graphs.get(is_single)
        if graph is None:
            self.calls[is_single] = call
            return self.layer(*args, **kwargs)
        return graph(*call.inputs(), *self.function.weights)[0]

    def _read(self, cache: ModelCache, call: LayerCall) -> Any:
        """Read a prompt's chunk."""
        tensors = call.tensors()
        if self.chunk is not None and self._kernels.are_used:
            return self.chunk(ChunkAttention(cache, self._number), *tensors, *self.function.weights)
        if self.chunk_call is None or self.chunk_call.tensors()[0].shape[0] < tensors[0].shape[0]:
            self.chunk_call = call.replaced([tensor.to("meta") for tensor in tensors])
        return self.layer(*call.args, **call.kwargs)

    def trace(self, call: StepCall) -> GraphSource:
        """Return the graph of a decode step's call. Raises GraphError."""
        if len(call.planes) != 2:
            raise GraphError("it holds latents instead of keys and values")
        num_rows = call.kind.entries.shape[0]
        entries, bias, *planes = call.inputs()[len(call.given.tensors()) :]
        given = [
            InputSpec.of(tensor, _ROW if tensor.shape[0] == num_rows else ())
            for tensor in call.given.tensors()
        ]
        own = [
            InputSpec.of(entries, _ROW),
            InputSpec.of(bias, _PLAN),
            *(InputSpec.of(plane, _PLANE) for plane in planes),
        ]
        with self._kernels.used():
            return self.function.trace(
                call.given, given, own, lambda entries, bias, *planes: _TracedSlots(entries, bias, planes)
            )

    def trace_chunk(self, call: LayerCall) -> ChunkCode | None:
        """Return the code of a chunk's call; none if it cannot be traced."""
        try:
            with self._kernels.used():
                return chunk_code(self.function, call)
        except GraphError as error:
            logger.info("chunks of prompts are read by the layer itself: %s", str(error).splitlines()[0])
            return None


class LayerGraphs:
    """The layers of a model that may run as graphs."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        layers = decoder_layers(model)
        self.layers = [GraphedLayer(layer, number, kernels) for number, layer in enumerate(layers)]
        for number, layer in enumerate(self.layers):
            layers[number] = layer

    def trace(self) -> dict[str, GraphSource]:
        """Return the different graphs of the layers by their keys. A chunk of each shape has been read, and a step decoded in each pool."""
        self._trace_chunks()
        alike: dict[Hashable, list[tuple[GraphedLayer, bool]]] = {}
        for layer in self.layers:
            for is_single, call in layer.calls.items():
                alike.setdefault(layer.function.structure(call.inputs()), []).append((layer, is_single))
        sources: dict[str, GraphSource] = {}
        for users in alike.values():
            layer, is_single = users[0]
            try:
                source = layer.trace(layer.calls[is_single])
            except GraphError as error:
                logger.info(
                    "%d of %d layers have no graph: %s",
                    len(users),
                    len(self.layers),
                    str(error).splitlines()[0],
                )
                continue
            sources[source.key] = source
            for layer, is_single in users:
                layer.sources[is_single] = source
        return sources

    def _trace_chunks(self) -> None:
        """Trace what layers do with a prompt's chunk; those that cannot be traced stay as they are."""
        codes: dict[Hashable, ChunkCode | None] = {}
        for layer in self.layers:
            if layer.chunk_call is None:
                continue
            structure = layer.function.structure(layer.chunk_call.tensors())
            if structure not in codes:
                codes[structure] = layer.trace_chunk(layer.chunk_call)
            layer.chunk = codes[structure]

    def use(self, graphs: Mapping[str, Compiled]) -> None:
        """Let the layers run these graphs from the next step on."""
        for layer in self.layers:
            layer.graphs |= {
                is_single: graphs[source.key]
                for is_single, source in layer.sources.items()
                if source.key in graphs
            }

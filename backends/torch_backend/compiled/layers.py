"""A model's decoder layers as static graphs, which decode steps and prompt chunks run instead of the layers.

Layers of the same structure share one graph. It is traced and compiled once, and called with each layer's
weights and slots. A layer that cannot be traced is not replaced, for instance one that chooses experts by
value.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.compiled.chunks import ChunkAttention, ChunkCode, chunk_code
from backends.torch_backend.compiled.layer_function import LayerFunction, TracedCache, is_wrapped
from backends.torch_backend.compiled.trace import Compiled, GraphError, GraphSource, InputSpec
from backends.torch_backend.forward.cache import CacheLayer, ModelCache
from backends.torch_backend.forward.stand_in import LayerCall, StandIn, decoder_layers
from backends.torch_backend.forward.step import DecodeStep, KindStep
from backends.torch_backend.model.attention import AttentionOptions
from backends.torch_backend.model.recurrent import Mix, mix_live_rows
from backends.torch_backend.native.kernels import (
    Kernels,
    advance_states,
    slot_attention,
    sparse_attention,
)

logger = logging.getLogger(__name__)

# The sizes of a decode step's inputs that differ from call to call.
_ROW_SIZES = ("rows",)
_BIAS_SIZES = ("rows", None, "entries")
_PLANE_SIZES = ("slots", None, "capacity")
_STORE_SIZES = (*(("slots", None, "blocks"), ("slots", None, "stored")) * 2, ("slots", None))
_STATE_SIZES = ("slots",)


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A layer's call in a decode step, with the tensors that the layer finds in its cache.

    `slots` [row] are the rows' slots. `num_attended` is 0 for slots without a store; else the planes of the
    store are the last ones, two for each of the others and one more. There are no planes where a layer does
    not attend.
    """

    call: LayerCall
    slots: Tensor
    kind: KindStep
    is_live: Tensor
    planes: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    num_attended: int = 0

    @classmethod
    def of(cls, call: LayerCall, step: DecodeStep, layer: CacheLayer) -> "DecodeCall":
        states = layer.slots.states
        contents = layer.slots.contents
        planes = contents[: len(contents) - len(states)]
        kind = layer.of_step(step)
        return cls(call, step.rows, kind, step.is_live, planes, states, _num_attended(layer))

    @property
    def num_own_planes(self) -> int:
        """The planes but for those of the store."""
        return (len(self.planes) - 1) // 3 if self.num_attended else len(self.planes)

    def step_tensors(self) -> list[Tensor]:
        """Return what a step brings for all layers of a kind."""
        return [tensor for tensor, _ in self._step_inputs()]

    def _step_inputs(self) -> list[tuple[Tensor, tuple[str | None, ...]]]:
        """Return what a step brings, and which sizes differ from call to call.

        With a store or states, row i always has slot i.
        """
        inputs: list[tuple[Tensor, tuple[str | None, ...]]] = []
        if self.planes:
            stored = self.kind.num_stored if self.num_attended else None
            by_row = self.slots if stored is None else stored
            inputs += [
                (self.kind.entries, _ROW_SIZES),
                (self.kind.bias, _BIAS_SIZES),
                (by_row, _ROW_SIZES),
            ]
        if self.states:
            inputs.append((self.is_live, _ROW_SIZES))
        return inputs

    def inputs(self) -> list[Tensor]:
        """Return the inputs of the layer's graph, but for the weights."""
        return [
            *self.call.tensors(),
            *(tensor.contiguous() for tensor in self.step_tensors()),
            *self.planes,
            *self.states,
        ]

    def specs(self) -> tuple[list[InputSpec], list[InputSpec]]:
        """Return the specs of the call's own tensors and of those of the cache.

        Rows, slots and capacities have names, so that layers whose slots differ in size share a graph.
        """
        call_tensors = self.call.tensors()
        num_rows = self.kind.entries.shape[0]
        call_specs = [
            InputSpec.of(tensor, _ROW_SIZES if tensor.shape[0] == num_rows else ()) for tensor in call_tensors
        ]
        plane_sizes = [*[_PLANE_SIZES] * self.num_own_planes, *_STORE_SIZES]
        cache_specs = [
            *(InputSpec.of(*pair) for pair in self._step_inputs()),
            *(InputSpec.of(*pair) for pair in zip(self.planes, plane_sizes, strict=False)),
            *(InputSpec.of(state, _STATE_SIZES) for state in self.states),
        ]
        return call_specs, cache_specs

    def traced(self, tensors: Sequence[Tensor]) -> "_SlotCache":
        """Return the cache of the layer's graph, of the inputs that `specs` has for it."""
        remaining = iter(tensors)
        kind, by_row = self.kind, self.slots
        if self.planes:
            kind = KindStep(next(remaining), next(remaining))
            by_row = next(remaining)
        is_live = next(remaining) if self.states else self.is_live
        planes = tuple(itertools.islice(remaining, len(self.planes)))
        return _SlotCache(kind, by_row, is_live, planes, tuple(remaining), self.num_attended)


def _num_attended(layer: CacheLayer) -> int:
    store = layer.kind.policy.store
    return store.num_attended if store is not None and layer.holds_entries else 0


@dataclass(frozen=True, slots=True)
class _SlotCache(TracedCache):
    kind: KindStep
    by_row: Tensor  # [row]: the slots, or with a store how many tokens it holds
    is_live: Tensor
    planes: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    num_attended: int

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return mix_live_rows(mixer, hidden, self.states, self.is_live, advance_states)

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        arguments = query, key, value, self.planes, self.kind.entries, self.kind.bias
        scaling, softcap, sinks = options.scaling, options.softcap, options.sinks
        if self.num_attended == 0:
            return slot_attention(
                *arguments, scaling=scaling, softcap=softcap, sinks=sinks, slots=self.by_row
            )
        return sparse_attention(
            *arguments,
            self.by_row,
            self.num_attended,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )


# Pools with the same variant share graphs: whether they have a single slot, for which torch chooses other
# operations, the type of their planes if they have any, and how many tokens of a store are attended to.
Variant = tuple[bool, torch.dtype | None, int]


def variant_of(layer: CacheLayer) -> Variant:
    slots = layer.slots
    dtype = slots.planes[0].dtype if slots.planes else None
    return slots.num_slots == 1, dtype, _num_attended(layer)


class GraphedLayer(StandIn):
    """A layer with its graphs."""

    def __init__(self, layer: nn.Module, index: int, kernels: Kernels) -> None:
        super().__init__(layer)
        self.function = LayerFunction(layer)
        self._index = index
        self._kernels = kernels
        # By the pool's variant: the last call, the graph's text, and the graph.
        self.calls: dict[Variant, DecodeCall] = {}
        self.sources: dict[Variant, GraphSource] = {}
        self.graphs: dict[Variant, Compiled] = {}
        # The chunk with the most rows so far. With several rows, the inputs that have one row each are known
        # by their size.
        self.chunk_call: LayerCall | None = None
        self.chunk: ChunkCode | None = None
        # Called instead of the layer while the step around the layers is traced.
        self.replacement: Callable[[DecodeCall], object] | None = None
        self._wraps = False  # whether the layer returns its hidden states in a tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: ModelCache = kwargs["slot_cache"]
        call = LayerCall(args, kwargs)
        if cache.shares_entries:  # a graph would lose the keys and values that a layer hands to later ones
            return self.layer(*args, **kwargs)
        if not isinstance(cache.step, DecodeStep):
            return self._read_chunk(cache, call)
        cache_layer = cache.layers[self._index]
        decode_call = DecodeCall.of(call, cache.step, cache_layer)
        if self.replacement is not None:
            return self._as_returned(self.replacement(decode_call))
        variant = variant_of(cache_layer)
        graph = self.graphs.get(variant)
        if graph is None:
            self.calls[variant] = decode_call
            return self._run(call)
        return self._as_returned(graph(*decode_call.inputs(), *self.function.weights)[0])

    def _run(self, call: LayerCall) -> Any:
        output = self.layer(*call.args, **call.kwargs)
        self._wraps = is_wrapped(output)
        return output

    def _as_returned(self, hidden: object) -> object:
        """Return hidden states as the layer itself does."""
        return (hidden,) if self._wraps else hidden

    def _read_chunk(self, cache: ModelCache, call: LayerCall) -> Any:
        tensors = call.tensors()
        if self.chunk is not None and self._kernels.are_used:
            attention = ChunkAttention(cache, self._index)
            return self._as_returned(self.chunk(attention, *tensors, *self.function.weights))
        if self.chunk_call is None or self.chunk_call.tensors()[0].shape[0] < tensors[0].shape[0]:
            self.chunk_call = call.replaced([tensor.to("meta") for tensor in tensors])  # shapes are enough
        return self._run(call)

    def trace(self, decode_call: DecodeCall) -> GraphSource:
        """Return the graph of a decode step's call. Raises GraphError."""
        if decode_call.num_own_planes == 1:
            raise GraphError("its cache holds latents instead of keys and values")
        call_inputs, cache_inputs = decode_call.specs()

        def cache(*tensors: Tensor) -> _SlotCache:
            return decode_call.traced(tensors)

        with self._kernels.used():
            return self.function.trace(decode_call.call, call_inputs, cache_inputs, cache)

    def trace_chunk(self, call: LayerCall) -> ChunkCode | None:
        """Return the code of a chunk's call; None if it cannot be traced."""
        try:
            with self._kernels.used():
                return chunk_code(self.function, call)
        except GraphError as error:
            logger.info("prompt chunks run through the layer itself: %s", str(error).splitlines()[0])
            return None


class LayerGraphs:
    """All layers of a model, each replaced by a `GraphedLayer`."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        layers = decoder_layers(model)
        self.layers = [GraphedLayer(layer, index, kernels) for index, layer in enumerate(layers)]
        for index, layer in enumerate(self.layers):
            layers[index] = layer

    def trace(self) -> dict[str, GraphSource]:
        """Return the layers' distinct graphs by their keys.

        A chunk of each shape must have been read, and a step decoded in each pool.
        """
        self._trace_chunks()
        by_structure: dict[Hashable, list[tuple[GraphedLayer, Variant]]] = {}
        for layer in self.layers:
            for variant, call in layer.calls.items():
                call_specs, cache_specs = call.specs()
                # A graph holds `num_attended` as a constant.
                structure = call.num_attended, layer.function.structure([*call_specs, *cache_specs])
                by_structure.setdefault(structure, []).append((layer, variant))
        sources: dict[str, GraphSource] = {}
        for users in by_structure.values():
            layer, variant = users[0]
            try:
                source = layer.trace(layer.calls[variant])
            except GraphError as error:
                reason = str(error).splitlines()[0]
                logger.info("%d of %d layers have no graph: %s", len(users), len(self.layers), reason)
                continue
            sources[source.key] = source
            for layer, variant in users:
                layer.sources[variant] = source
        return sources

    def _trace_chunks(self) -> None:
        """Trace the layers' work on a chunk, once for all layers of a structure."""
        codes: dict[Hashable, ChunkCode | None] = {}
        for layer in self.layers:
            if layer.chunk_call is None:
                continue
            structure = layer.function.structure([InputSpec.of(each) for each in layer.chunk_call.tensors()])
            if structure not in codes:
                codes[structure] = layer.trace_chunk(layer.chunk_call)
            layer.chunk = codes[structure]

    def use(self, graphs: Mapping[str, Compiled]) -> None:
        """Run these graphs from the next step on."""
        for layer in self.layers:
            layer.graphs |= {
                variant: graphs[source.key]
                for variant, source in layer.sources.items()
                if source.key in graphs
            }

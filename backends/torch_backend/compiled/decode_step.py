"""A pool's decode step as static graphs: one before the layers, stacks of a few layers each, and one after.

The host then calls a handful of graphs, where the model's code would call a hundred small operations.
This works for models that hand each layer's output to the next one unchanged, and all of whose layers have
graphs. Other models run their layers' graphs one by one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.torch_backend.compiled.layers import DecodeCall, GraphedLayer, variant_of
from backends.torch_backend.compiled.trace import Compiled, GraphError, GraphSource, InputSpec, chain, trace
from backends.torch_backend.forward.plan import MIN_ROWS, DecodePlan, ForwardPass
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.pool import TorchPool

logger = logging.getLogger(__name__)

# Layers in one graph. Each call of a graph costs the host some 40 µs; each layer of a graph takes the
# compiler a second or more.
_LAYERS_PER_GRAPH = 4

Replacement = Callable[[DecodeCall], object]


@dataclass(frozen=True, slots=True)
class _LayerInputs:
    """The inputs of one layer's graph after the hidden states.

    `shared` are indices into the tensors that the first graph makes for all layers: rotary angles, entries,
    masks.
    """

    source: GraphSource
    shared: tuple[int, ...]
    own: tuple[Tensor, ...]  # the layer's slots and weights


@dataclass(frozen=True, slots=True)
class _Stack:
    """A graph of several layers, by its key, and its inputs after the hidden states: see `_LayerInputs`."""

    key: str
    shared: tuple[int, ...]
    own: tuple[Tensor, ...]


class DecodeStepGraphs:
    """The decode step of one pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[GraphedLayer],
        pool: TorchPool,
        max_position: int,
        kernels: Kernels,
    ) -> None:
        self._model = model
        self._layers = layers
        self._pool = pool
        self._max_position = max_position
        self._kernels = kernels
        in_layers = {weight.data_ptr() for layer in layers for weight in layer.function.weights}
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        # The weights outside the layers are inputs of the first and the last graph.
        outside = {name: weight.detach() for name, weight in named if weight.data_ptr() not in in_layers}
        self._names = list(outside)
        self._weights = list(outside.values())
        # A graph can read a number only as a tensor's size: slices of this one are as long as a step's read
        # lengths.
        longest = max(kind.policy.layout.capacity for kind in pool.kinds)
        self._lengths = torch.empty(longest, dtype=torch.int8)
        self._num_rows: int | str = 1 if pool.spec.num_slots == 1 else "rows"
        self._layer_inputs: list[_LayerInputs] = []
        self._stacks: list[_Stack] = []
        self._ends: tuple[str, ...] = ()  # the keys of the graphs before the layers and after them
        self._graphs: Mapping[str, Compiled] = {}
        self._needs_rows = True

    def trace(self) -> dict[str, GraphSource]:
        """Return the step's graphs by their keys; none if it has none.

        A decode step must have been run, and the layers traced.
        """
        try:
            if self._pool.cache.shares_entries:
                raise GraphError("layers attend to what others store")
            with self._kernels.used():
                ends = [self._trace_before(), self._trace_after()]
        except GraphError as error:
            reason = str(error).splitlines()[0]
            logger.info("decode steps run layer by layer, since a step is not one graph: %s", reason)
            return {}
        self._ends = tuple(source.key for source in ends)
        sources = {source.key: source for source in (*ends, *self._stack())}
        self._needs_rows = any(source.needs_rows for source in sources.values())
        return sources

    @property
    def are_used(self) -> bool:
        """Whether `run` can be called."""
        return bool(self._graphs)

    @property
    def min_rows(self) -> int:
        """The fewest rows with which a step rounds each row as it does beside others."""
        return 1 if self.are_used and not self._needs_rows else MIN_ROWS

    def use(self, graphs: Mapping[str, Compiled]) -> None:
        """Run these graphs from the next step on, if the step was traced."""
        if self._ends:
            self._graphs = graphs

    def run(self, plan: DecodePlan) -> tuple[Tensor, Tensor]:
        """Return the logits [slot, vocabulary] of a plan's next step and each slot's most likely token."""
        before, after = (self._graphs[key] for key in self._ends)
        lengths = [self._lengths[:length] for length in plan.read_lengths]
        hidden, *shared = before(plan.inputs, *lengths, *self._weights)
        for stack in self._stacks:
            graph = self._graphs[stack.key]
            hidden = graph(hidden, *[shared[index] for index in stack.shared], *stack.own)[0]
        logits, best = after(hidden, *self._weights)
        return logits, best

    def _stack(self) -> list[GraphSource]:
        """Return the graphs of every few layers, and record their inputs."""
        sources = []
        self._stacks.clear()
        for first in range(0, len(self._layer_inputs), _LAYERS_PER_GRAPH):
            layers = self._layer_inputs[first : first + _LAYERS_PER_GRAPH]
            source, shared = chain([(layer.source, layer.shared) for layer in layers])
            own = tuple(tensor for layer in layers for tensor in layer.own)
            self._stacks.append(_Stack(source.key, shared, own))
            sources.append(source)
        return sources

    def _trace_before(self) -> GraphSource:
        """Trace the model up to its first layer: what it computes there for the layers to share.

        The layers are replaced by functions that record their calls. To see what is common to all of them,
        the model must call each one, with a placeholder for the output of the layer before it. The last layer
        returns hidden states again: the model computes logits of them, which nothing reads, so that they are
        not in the graph.
        """
        num_kinds = len(self._pool.kinds)
        calls: list[DecodeCall] = []
        placeholder = object()  # can be passed to the next layer, and used for nothing else

        def record(call: DecodeCall) -> object:
            calls.append(call)
            return placeholder if len(calls) < len(self._layers) else calls[0].call.tensors()[0]

        def run(inputs: Tensor, *others: Tensor) -> object:
            lengths = others[:num_kinds]
            weights = others[num_kinds:]
            read_lengths = tuple(length.shape[0] for length in lengths)
            plan = DecodePlan(self._pool.kinds, inputs, read_lengths, self._max_position)
            self._call_model(plan.forward_pass(), weights, [record] * len(self._layers))
            if len(calls) != len(self._layers):
                raise GraphError(
                    f"the model must call its {len(self._layers)} layers once each, got {len(calls)} calls"
                )
            return [tensor.contiguous() for tensor in self._assign_inputs(calls, placeholder)]

        plan_inputs = InputSpec((3 + 2 * num_kinds, self._num_rows), "int64")
        lengths = [InputSpec(("entries",), "int8")] * num_kinds
        return trace(run, [plan_inputs, *lengths, *map(InputSpec.of, self._weights)])

    def _assign_inputs(self, calls: Sequence[DecodeCall], placeholder: object) -> list[Tensor]:
        """Record each layer's inputs; return the first layer's hidden states, then each shared tensor."""
        hidden, *_ = calls[0].call.tensors()
        shared: dict[int, Tensor] = {}  # by identity: a traced tensor is one object wherever it is used
        self._layer_inputs.clear()
        for index, (layer, call) in enumerate(zip(self._layers, calls, strict=True)):
            if (call.call.args[0] is placeholder) != (index > 0):
                raise GraphError("the model changes hidden states between its layers")
            tensors = [
                tensor for tensor in (*call.call.tensors(), *call.step_tensors()) if tensor is not hidden
            ]
            shared |= {id(tensor): tensor for tensor in tensors}
            positions = list(shared)
            cache_layer = self._pool.cache.layers[index]
            source = layer.sources.get(variant_of(cache_layer))
            if source is None:
                raise GraphError(f"layer {index} has no graph")
            shared_indices = tuple(positions.index(id(tensor)) for tensor in tensors)
            own = (*cache_layer.slots.contents, *layer.function.weights)
            self._layer_inputs.append(_LayerInputs(source, shared_indices, own))
        return [hidden, *shared.values()]

    def _trace_after(self) -> GraphSource:
        """Trace the model after its last layer, up to the logits and each slot's most likely token."""
        last_call = self._layers[-1].calls[variant_of(self._pool.cache.layers[-1])]
        hidden = next(iter(last_call.call.tensors()))

        def run(output: Tensor, *weights: Tensor) -> object:
            # Dead code alone reads the plan, so one kind's masks serve all: tracing them takes long.
            inputs = torch.zeros(5, output.shape[0], dtype=torch.int64)
            plan = DecodePlan(self._pool.kinds[:1], inputs, (1,), self._max_position)
            forward_pass = plan.forward_pass()
            step = replace(forward_pass.step, kinds=forward_pass.step.kinds * len(self._pool.kinds))
            forward_pass = replace(forward_pass, step=step)
            # Each layer passes its hidden states on, and the last returns the graph's input: the model's code
            # before the layers then computes nothing that the logits depend on.
            passing: list[Replacement] = [lambda call: call.call.args[0]] * (len(self._layers) - 1)
            logits = self._call_model(forward_pass, weights, [*passing, lambda _: output])[:, -1]
            return [logits, logits.float().argmax(dim=-1)]

        return trace(run, [InputSpec.of(hidden, ("rows",)), *map(InputSpec.of, self._weights)])

    def _call_model(
        self,
        forward_pass: ForwardPass,
        weights: Sequence[Tensor],
        replacements: Sequence[Replacement],
    ) -> Tensor:
        """Return the logits [slot, 1, vocabulary] of the model with its layers replaced."""
        arguments = forward_pass.arguments(self._pool.cache) | {"logits_to_keep": 1}
        with _replaced(self._layers, replacements):
            named = dict(zip(self._names, weights, strict=True))
            logits: Tensor = torch.func.functional_call(
                self._model, named, (), arguments, tie_weights=False
            ).logits
        return logits


@contextmanager
def _replaced(layers: Sequence[GraphedLayer], replacements: Sequence[Replacement]) -> Iterator[None]:
    """Call these functions instead of the layers, for a time."""
    try:
        for layer, replacement in zip(layers, replacements, strict=True):
            layer.replacement = replacement
        yield
    finally:
        for layer in layers:
            layer.replacement = None

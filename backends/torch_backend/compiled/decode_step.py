"""A pool's decode step as static graphs: one of what comes before the layers, one of every few layers, and one of what follows them.

The host then calls a handful of graphs, where the model's own code would ask for a hundred small operations. Only for models that
hand each layer's output to the next one as it is, and all of whose layers have graphs; others call their layers' graphs themselves.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.torch_backend.compiled.layers import GraphedLayer, StepCall
from backends.torch_backend.compiled.trace import Compiled, GraphError, GraphSource, InputSpec, chain, trace
from backends.torch_backend.forward.plan import DecodePlan
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.pool import TorchPool

logger = logging.getLogger(__name__)


# Layers that share a call. Every call costs the host some 40 µs, and each layer that a graph holds takes the compiler a second or more.
_STACKED = 4


class _LastLayerError(Exception):
    """The model calls its last layer, and what follows is not of interest."""


@dataclass(frozen=True, slots=True)
class _LayerInputs:
    """What a layer's graph is called with after its input: which of the tensors made before the layers, and its own slots and weights."""

    source: GraphSource
    shared: tuple[int, ...]
    own: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """What the graph of several layers is called with after its input."""

    key: str
    shared: tuple[int, ...]
    own: tuple[Tensor, ...]


class StepGraphs:
    """The decode step of one pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[GraphedLayer],
        pool: TorchPool,
        max_position: int,
        kernels: Kernels,
    ) -> None:
        self._model, self._layers, self._pool, self._max_position, self._kernels = (
            model,
            layers,
            pool,
            max_position,
            kernels,
        )
        inside = {weight.data_ptr() for layer in layers for weight in layer.function.weights}
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        outside = {name: weight.detach() for name, weight in named if weight.data_ptr() not in inside}
        self._names, self._weights = list(outside), list(outside.values())
        longest = max(kind.policy.layout.capacity for kind in pool.kinds)
        self._lengths = torch.empty(
            longest, dtype=torch.int8
        )  # a graph knows a size only as that of a tensor
        self._is_single = pool.spec.num_slots == 1
        self._calls: list[_LayerInputs] = []
        self._stacks: list[_Stack] = []
        self._ends: tuple[str, ...] = ()  # the keys of what comes before the layers and after them
        self._graphs: Mapping[str, Compiled] = {}

    def trace(self) -> dict[str, GraphSource]:
        """Return the step's graphs by their keys; none if it has none. A decode step has been run, and layers are traced."""
        try:
            with self._kernels.used():
                ends = [self._trace_before(), self._trace_after()]
        except GraphError as error:
            logger.info("a decode step is no whole graph: %s", str(error).splitlines()[0])
            return {}
        self._ends = tuple(source.key for source in ends)
        stacks = self._stack()
        return {source.key: source for source in (*ends, *stacks)}

    @property
    def are_used(self) -> bool:
        return bool(self._graphs)

    def use(self, graphs: Mapping[str, Compiled]) -> None:
        """Run these graphs from the next step on, if it was traced."""
        if self._ends:
            self._graphs = graphs

    def run(self, plan: DecodePlan) -> tuple[Tensor, Tensor] | None:
        """Return the logits [slot, vocabulary] of a plan's next step and the likeliest token of each; None where there are no graphs."""
        if not self._graphs:
            return None
        before, after = (self._graphs[key] for key in self._ends)
        hidden, *shared = before(
            plan.numbers, *(self._lengths[:length] for length in plan.read_lengths), *self._weights
        )
        for stack in self._stacks:
            hidden = self._graphs[stack.key](
                hidden, *[shared[number] for number in stack.shared], *stack.own
            )[0]
        logits, best = after(hidden, *self._weights)
        return logits, best

    def _stack(self) -> list[GraphSource]:
        """Return the graphs of every few layers, and write down what they are called with."""
        sources = []
        self._stacks.clear()
        for first in range(0, len(self._calls), _STACKED):
            calls = self._calls[first : first + _STACKED]
            source, shared = chain([(call.source, call.shared) for call in calls])
            self._stacks.append(
                _Stack(source.key, shared, tuple(tensor for call in calls for tensor in call.own))
            )
            sources.append(source)
        return sources

    def _trace_before(self) -> GraphSource:
        """Trace the model until its last layer, while the layers note what they are called with."""
        num_kinds = len(self._pool.kinds)
        calls: list[StepCall] = []
        tensors: list[Tensor] = []
        unknown = object()  # what a layer returns, which can be handed on and nothing else

        def note(call: StepCall) -> object:
            calls.append(call)
            if len(calls) == len(self._layers):
                raise _LastLayerError
            return unknown

        def run(numbers: Tensor, *others: Tensor) -> object:
            lengths, weights = others[:num_kinds], others[num_kinds:]
            try:
                self._call(
                    numbers, tuple(length.shape[0] for length in lengths), weights, [note] * len(self._layers)
                )
            except _LastLayerError:
                tensors[:] = self._place(calls, unknown)
                return [tensor.contiguous() for tensor in tensors]
            raise GraphError("it does not call every layer")

        plan = [
            InputSpec((2 + 2 * num_kinds, self._rows), "int64"),
            *[InputSpec(("entries",), "int8")] * num_kinds,
        ]
        return trace(run, [*plan, *map(InputSpec.of, self._weights)])

    def _place(self, calls: Sequence[StepCall], unknown: object) -> list[Tensor]:
        """Return the first layer's input and, each once, what layers are given beside theirs; write down which go to which."""
        hidden, *_ = calls[0].given.tensors()
        shared: dict[int, Tensor] = {}
        self._calls.clear()
        for number, (layer, call) in enumerate(zip(self._layers, calls, strict=True)):
            if (call.given.args[0] is unknown) != (number > 0):
                raise GraphError("something happens between the layers")
            given = [
                tensor
                for tensor in (*call.given.tensors(), call.kind.entries, call.kind.bias)
                if tensor is not hidden
            ]
            shared |= {id(tensor): tensor for tensor in given}
            places = tuple(list(shared).index(id(tensor)) for tensor in given)
            source = layer.sources.get(self._is_single)
            if source is None:
                raise GraphError(f"layer {number} has no graph")
            planes = self._pool.cache.layers[number].slots.planes
            self._calls.append(_LayerInputs(source, places, (*planes, *layer.function.weights)))
        return [hidden, *shared.values()]

    def _trace_after(self) -> GraphSource:
        """Trace what the model does with the last layer's output."""
        hidden = next(iter(self._layers[-1].calls[self._is_single].given.tensors()))

        def run(output: Tensor, *weights: Tensor) -> object:
            numbers = torch.zeros(2 + 2 * len(self._pool.kinds), output.shape[0], dtype=torch.int64)
            stand_ins: list[Callable[[StepCall], object]] = [lambda call: call.given.args[0]] * (
                len(self._layers) - 1
            ) + [lambda _: output]
            logits = self._call(numbers, (1,) * len(self._pool.kinds), weights, stand_ins)[:, -1]
            return [logits, logits.float().argmax(dim=-1)]

        return trace(run, [InputSpec.of(hidden, ("rows",)), *map(InputSpec.of, self._weights)])

    @property
    def _rows(self) -> int | str:
        return 1 if self._is_single else "rows"

    def _call(
        self,
        numbers: Tensor,
        read_lengths: tuple[int, ...],
        weights: Sequence[Tensor],
        stand_ins: Sequence[Callable[[StepCall], object]],
    ) -> Tensor:
        """Return the model's logits [slot, 1, vocabulary], others called in its layers' places."""
        forward_pass = DecodePlan(self._pool.kinds, numbers, read_lengths, self._max_position).forward_pass()
        arguments = forward_pass.arguments(self._pool.cache) | {"logits_to_keep": 1}
        with _standing_in(self._layers, stand_ins):
            named = dict(zip(self._names, weights, strict=True))
            logits: Tensor = torch.func.functional_call(
                self._model, named, (), arguments, tie_weights=False
            ).logits
        return logits


@contextmanager
def _standing_in(
    layers: Sequence[GraphedLayer], stand_ins: Sequence[Callable[[StepCall], object]]
) -> Iterator[None]:
    try:
        for layer, stand_in in zip(layers, stand_ins, strict=True):
            layer.stand_in = stand_in
        yield
    finally:
        for layer in layers:
            layer.stand_in = None

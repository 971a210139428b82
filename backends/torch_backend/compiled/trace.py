"""Static graphs: a function over tensors, traced once, kept as text, compiled by another process and loaded from its file.

A graph's text is what it is known by: whatever traces to the same text shares one compiled file, and nothing else can be mistaken for it.
Sizes that differ from call to call have names; a graph serves all of them, so that no call ever compiles. Nothing here knows a model.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from backends.torch_backend.compiled.fusion import fuse
from backends.torch_backend.torch_private import inductor

Function = Callable[..., object]
Compiled = Callable[..., Sequence[Tensor]]

_EXAMPLE_SIZES = {"rows": 5, "tokens": 37, "entries": 48, "slots": 7, "capacity": 83}


class GraphError(Exception):
    """A function that has no static graph."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A contiguous tensor: its sizes, by name where they differ from call to call, and its dtype."""

    sizes: tuple[int | str, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor, names: Sequence[str | None] = ()) -> "InputSpec":
        """Describe a tensor whose first sizes have `names`. A size of 1 is always taken as it is: it has a meaning of its own."""
        padded = (*names, *(None,) * (tensor.dim() - len(names)))
        sizes = tuple(
            size if name is None or size == 1 else name
            for size, name in zip(tensor.shape, padded, strict=True)
        )
        return cls(sizes, str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as text: the code of a function `forward(self, …)` of torch's operators, and what it is called with."""

    code: str
    inputs: tuple[InputSpec, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:24]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GraphSource":
        document = json.loads(text)
        return cls(
            document["code"],
            tuple(InputSpec(tuple(spec["sizes"]), spec["dtype"]) for spec in document["inputs"]),
        )


def trace(function: Function, inputs: Sequence[InputSpec]) -> GraphSource:
    """Return the graph of a function that returns tensors, fused. Raises GraphError where what it does depends on values or named sizes."""
    graph, _ = _trace(function, inputs)
    constants = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    if constants:
        raise GraphError(f"it reads tensors that are not among its inputs: {', '.join(map(str, constants))}")
    fuse(graph.graph)
    graph.recompile()
    return GraphSource(graph.code, tuple(inputs))


def chain(links: Sequence[tuple[GraphSource, Sequence[int]]]) -> tuple[GraphSource, tuple[int, ...]]:
    """Return the graph that hands a tensor through others, and which of the shared tensors it is called with after it.

    Each link is called with what the one before it returned, with the shared tensors of the given numbers, and then with its own.
    """
    shared = {
        number: spec
        for source, numbers in links
        for number, spec in zip(numbers, source.inputs[1:], strict=False)
    }
    sources, places = (
        list(dict.fromkeys(source for source, _ in links)),
        {number: place for place, number in enumerate(shared)},
    )
    specs, calls = [links[0][0].inputs[0], *shared.values()], []
    for source, numbers in links:
        own = source.inputs[1 + len(numbers) :]
        given = [*(places[number] for number in numbers), *range(len(specs) - 1, len(specs) - 1 + len(own))]
        specs += own
        calls.append(
            f"    passed = link{sources.index(source)}(self, passed, {', '.join(f'others[{place}]' for place in given)})"
        )
    functions = [
        source.code.replace("def forward(", f"def link{number}(", 1) for number, source in enumerate(sources)
    ]
    code = "\n".join([*functions, "def forward(self, passed, *others):", *calls, "    return passed"])
    return GraphSource(code, tuple(specs)), tuple(shared)


def compile_graph(source: GraphSource, target: Path) -> None:
    """Compile a graph into a file."""
    forward = inductor.function_of(source.code)
    graph, examples = _trace(lambda *tensors: forward(None, *tensors), source.inputs)
    inductor.compile_to_file(graph, examples, target)


def _trace(function: Function, inputs: Sequence[InputSpec]) -> tuple[GraphModule, list[Tensor]]:
    try:
        graph, examples = inductor.trace_symbolically(function, [_example(spec) for spec in inputs])
    except Exception as error:  # whatever a model's code may do
        raise GraphError(f"{type(error).__name__}: {error}") from error
    for spec, example in zip(inputs, examples, strict=True):
        for name, size in zip(spec.sizes, example.shape, strict=True):
            if isinstance(name, str) and not inductor.is_symbolic(size):
                raise GraphError(f"it works for one number of {name} only")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, examples


def _example(spec: InputSpec) -> tuple[Tensor, list[bool]]:
    """Return a tensor as the spec says, and which of its sizes differ from call to call."""
    sizes = [_EXAMPLE_SIZES[size] if isinstance(size, str) else size for size in spec.sizes]
    tensor = torch.empty(sizes, dtype=getattr(torch, spec.dtype))
    return tensor, [isinstance(size, str) for size in spec.sizes]

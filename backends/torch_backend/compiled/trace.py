"""Static graphs: a function over tensors, traced once, kept as text, compiled by another process and loaded from its file.

A graph's text is what it is known by: whatever traces to the same text shares one compiled file, and nothing else can be mistaken for it.
Sizes that differ from call to call have names; a graph serves all of them, so that no call ever compiles. Nothing here knows a model.
"""

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from backends.torch_backend.compiled.fusion import fuse

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, to itself
    import torch._inductor.compile_fx
    from torch._inductor.standalone_compile import CompiledArtifact

Function = Callable[..., object]
Compiled = Callable[..., Sequence[Tensor]]

# Of torch's inductor, when a graph is compiled and when it is loaded.
OPTIONS = {
    # Operators are called from C++, so that other threads may run Python meanwhile.
    "cpp_wrapper": True,
    # Small element-wise loops stay on one core: another would need longer to wake up.
    "cpp.min_chunk_size": 1 << 16,
    # A process that only loads a graph would precompile the headers too, for ten seconds, before torch finds that
    # nothing is left to compile.
    "cpp_cache_precompile_headers": False,
}
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
    forward = function_of(source.code)
    graph, examples = _trace(lambda *tensors: forward(None, *tensors), source.inputs)
    mode = examples[0].fake_mode
    with tracing(TracingContext(mode)), torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        torch._inductor.standalone_compile(graph, [*examples], dynamic_shapes="from_tracing_context").save(
            path=str(target)
        )


def function_of(code: str) -> Function:
    """Return the function `forward(self, …)` that a graph's code defines."""
    scope: dict[str, object] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(code, scope)
    forward = scope["forward"]
    assert callable(forward), "a graph's code defines forward"
    return forward


def load_graph(path: Path) -> Compiled:
    """Load a compiled graph, in milliseconds. The operators it names must have been loaded."""
    with torch._inductor.config.patch(OPTIONS):
        loaded: Compiled = CompiledArtifact.load(path=str(path))
    return loaded


def _trace(function: Function, inputs: Sequence[InputSpec]) -> tuple[GraphModule, list[FakeTensor]]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    examples = [_example(mode, number, spec) for number, spec in enumerate(inputs)]
    try:
        with (
            torch.no_grad(),
            _silenced("torch._subclasses.fake_tensor"),
        ):  # what goes wrong is told by the error
            graph = make_fx(function, tracing_mode="symbolic")(*examples)
    except Exception as error:  # whatever a model's code may do
        raise GraphError(f"{type(error).__name__}: {error}") from error
    for spec, example in zip(inputs, examples, strict=True):
        for name, size in zip(spec.sizes, example.shape, strict=True):
            if isinstance(name, str) and not _varies(size):
                raise GraphError(f"it works for one number of {name} only")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, examples


def _varies(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    target = logging.getLogger(name)
    was_disabled, target.disabled = target.disabled, True
    try:
        yield
    finally:
        target.disabled = was_disabled


def _example(mode: FakeTensorMode, number: int, spec: InputSpec) -> FakeTensor:
    sizes = [_EXAMPLE_SIZES[size] if isinstance(size, str) else size for size in spec.sizes]
    kinds = [DimDynamic.DYNAMIC if isinstance(size, str) else DimDynamic.STATIC for size in spec.sizes]
    tensor = torch.empty(sizes, dtype=getattr(torch, spec.dtype))
    context: Any = StatelessSymbolicContext(kinds)
    example = mode.from_tensor(tensor, source=ConstantSource(f"input{number}"), symbolic_context=context)
    assert isinstance(example, FakeTensor)
    return example

"""torch's tracer, pattern matcher and compiler.

Importing this takes about a second, so no module imports it at the start.

Raises ImportError where this torch lacks one of them.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)

from backends.torch_backend.torch_private.graph_code import OPTIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, to itself
    import torch._inductor.compile_fx
    from torch._inductor.pattern_matcher import (
        MULTIPLE,
        CallFunction,
        Ignored,
        KeywordArg,
        PatternExpr,
        is_match,
    )
    from torch._inductor.standalone_compile import CompiledArtifact

# What `compiled.fusion` builds its patterns of.
__all__ = [
    "MULTIPLE",
    "CallFunction",
    "Ignored",
    "KeywordArg",
    "PatternExpr",
    "compile_to_file",
    "is_match",
    "is_symbolic",
    "load_compiled",
    "statically_known_true",
    "to_copy",
    "trace_symbolically",
]

to_copy = torch.ops.aten._to_copy.default


def trace_symbolically(
    function: Callable[..., object], inputs: Sequence[tuple[Tensor, Sequence[bool]]]
) -> tuple[GraphModule, list[Tensor]]:
    """Return a function's graph of aten operators, and the example inputs that it was traced with.

    `inputs` are a tensor for each argument, of which only sizes and type count, and for each of its sizes
    whether the graph must serve others too. Raises the errors of the function, and an error if it reads a
    tensor's values.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    examples = [_example(mode, index, tensor, are_open) for index, (tensor, are_open) in enumerate(inputs)]
    with torch.no_grad(), _disabled(logging.getLogger("torch._subclasses.fake_tensor")):
        graph = make_fx(function, tracing_mode="symbolic")(*examples)
    return graph, examples


def _example(mode: FakeTensorMode, index: int, tensor: Tensor, are_open: Sequence[bool]) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if is_open else DimDynamic.STATIC for is_open in are_open]
    context: Any = StatelessSymbolicContext(kinds)
    return mode.from_tensor(tensor, source=ConstantSource(f"input{index}"), symbolic_context=context)


@contextmanager
def _disabled(logger: logging.Logger) -> Iterator[None]:
    """Silence a logger: the exception that follows says the same."""
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def is_symbolic(size: int | torch.SymInt) -> bool:
    """Return whether a size of a traced tensor is symbolic, and not specialised by the function."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def compile_to_file(graph: GraphModule, examples: Sequence[Tensor], target: Path) -> None:
    """Compile what `trace_symbolically` returned into a file."""
    example = examples[0]
    assert isinstance(example, FakeTensor), "the examples are those that the graph was traced with"
    with tracing(TracingContext(example.fake_mode)), torch.no_grad(), torch._inductor.config.patch(OPTIONS):
        artifact = torch._inductor.standalone_compile(
            graph, [*examples], dynamic_shapes="from_tracing_context"
        )
        artifact.save(path=str(target))


def load_compiled(path: Path) -> Callable[..., Sequence[Tensor]]:
    """Load a file of `compile_to_file`, in milliseconds if its libraries are in inductor's folder.

    The operators that it names must have been loaded.
    """
    with torch._inductor.config.patch(OPTIONS):
        return CompiledArtifact.load(path=str(path))

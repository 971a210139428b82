"""Static graphs: a function over tensors, traced once, kept as text, and compiled by another process.

A graph is known by its text: functions that trace to the same text share one compiled file, and no other can
be mistaken for it. Sizes that differ from call to call have names, and a graph serves all of them, so that no
call ever compiles. This module knows nothing of models. Its functions import torch's tracer and compiler,
which takes a second.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from backends.torch_backend.torch_private.graph_code import function_of

Function = Callable[..., object]
Compiled = Callable[..., Sequence[Tensor]]

# The sizes with which a graph is traced: all different, and none that a model would have, so that a
# coincidence is not taken for a rule.
_EXAMPLE_SIZES = {
    "rows": 5,
    "tokens": 37,
    "entries": 48,
    "slots": 7,
    "capacity": 83,
    "blocks": 11,
    "stored": 176,
}

# The operand of these products that has a row for each sequence.
_LEFT_OPERANDS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
# In a graph's text: a product with a padded left operand, and any product of torch.
_PADDED = re.compile(r"aten\.(?:mm\.default\(|addmm\.default\(\w+, )constant_pad_nd")
_PRODUCT = re.compile(r"ops\.\w+\.\w*(?:mm|mv|dot|conv|matmul)\w*\.\w+\(")


class GraphError(Exception):
    """A function has no static graph."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A contiguous tensor: its dtype and its sizes, by name where they differ from call to call."""

    sizes: tuple[int | str, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor, names: Sequence[str | None] = ()) -> "InputSpec":
        """Return the spec of a tensor whose first sizes have `names`.

        A size of 1 is always fixed, since tensors broadcast along it.
        """
        padded = (*names, *(None,) * (tensor.dim() - len(names)))
        sizes = tuple(
            size if name is None or size == 1 else name
            for size, name in zip(tensor.shape, padded, strict=True)
        )
        return cls(sizes, str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as text: the code of a function `forward(self, …)` of torch's operators, and its inputs."""

    code: str
    inputs: tuple[InputSpec, ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:24]

    @property
    def needs_rows(self) -> bool:
        """Whether one row alone may be rounded differently from the same row beside others."""
        return _PRODUCT.search(_PADDED.sub("", self.code)) is not None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GraphSource":
        document = json.loads(text)
        inputs = tuple(InputSpec(tuple(spec["sizes"]), spec["dtype"]) for spec in document["inputs"])
        return cls(document["code"], inputs)


def trace(function: Function, inputs: Sequence[InputSpec]) -> GraphSource:
    """Return the fused graph of a function that returns tensors.

    Raises GraphError where the function depends on values, fixes a named size, or reads other tensors than
    its inputs.
    """
    from backends.torch_backend.compiled.fusion import fuse

    graph, _ = _trace(function, inputs)
    constants = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    if constants:
        names = ", ".join(map(str, constants))
        raise GraphError(f"the function reads tensors that are not among its inputs: {names}")
    fuse(graph.graph)
    if not any("tokens" in spec.sizes for spec in inputs):  # a chunk's products have many rows
        _pad_products(graph.graph)
    graph.recompile()
    return GraphSource(graph.code, tuple(inputs))


def chain(links: Sequence[tuple[GraphSource, Sequence[int]]]) -> tuple[GraphSource, tuple[int, ...]]:
    """Return the graph that passes a tensor through several graphs, and which shared tensors it takes.

    Each link is a graph and the indices of the shared tensors that it takes. It is called with the output of
    the link before it, with these tensors, and with tensors that no other link takes. The chained graph is
    called with the first input, then with each shared tensor once, in the order of the returned indices, then
    with the links' own tensors.
    """
    shared_specs: dict[int, InputSpec] = {}
    for source, shared in links:
        # Not strict: after the tensor that is passed on and the shared ones come the link's own tensors.
        shared_specs |= dict(zip(shared, source.inputs[1:], strict=False))
    position_of = {index: position for position, index in enumerate(shared_specs)}
    distinct = list(dict.fromkeys(source for source, _ in links))
    specs = [links[0][0].inputs[0], *shared_specs.values()]
    calls = []
    for source, shared in links:
        own = source.inputs[1 + len(shared) :]
        first_own = len(specs) - 1  # `others` does not hold the first input
        positions = [*(position_of[index] for index in shared), *range(first_own, first_own + len(own))]
        specs += own
        arguments = ", ".join(f"others[{position}]" for position in positions)
        calls.append(f"    passed = link{distinct.index(source)}(self, passed, {arguments})")
    functions = [
        source.code.replace("def forward(", f"def link{index}(", 1) for index, source in enumerate(distinct)
    ]
    code = "\n".join([*functions, "def forward(self, passed, *others):", *calls, "    return passed"])
    return GraphSource(code, tuple(specs)), tuple(shared_specs)


def compile_graph(source: GraphSource, target: Path) -> None:
    """Compile a graph into a file."""
    from backends.torch_backend.torch_private.inductor import compile_to_file

    forward = function_of(source.code)
    graph, examples = _trace(lambda *tensors: forward(None, *tensors), source.inputs)
    compile_to_file(graph, examples, target)


def _trace(function: Function, inputs: Sequence[InputSpec]) -> tuple[GraphModule, list[Tensor]]:
    from backends.torch_backend.torch_private.inductor import is_symbolic, trace_symbolically

    try:
        graph, examples = trace_symbolically(function, [_example(spec) for spec in inputs])
    except Exception as error:  # a model's code may raise anything
        raise GraphError(f"{type(error).__name__}: {error}") from error
    for spec, example in zip(inputs, examples, strict=True):
        for name, size in zip(spec.sizes, example.shape, strict=True):
            if isinstance(name, str) and not is_symbolic(size):
                raise GraphError(f"the function works for only one number of {name}: {size}")
    graph.graph.eliminate_dead_code(_has_effect)
    graph.recompile()
    return graph, examples


def _pad_products(graph: Graph) -> None:
    """Add a row of zeros to products of torch: with one row alone, they may round it differently.

    Few models have other products beside the kernels' than those of routers, which are small.
    """
    from backends.torch_backend.torch_private.inductor import is_symbolic

    for node in list(graph.nodes):
        if node.target not in _LEFT_OPERANDS:
            continue
        position = _LEFT_OPERANDS[node.target]
        *added, rows, weight = (operand.meta["val"] for operand in node.args)
        has_rows = is_symbolic(rows.shape[0]) and not any(map(is_symbolic, weight.shape))
        if not has_rows or any(each.dim() != 1 for each in added):
            continue
        with graph.inserting_before(node):
            padded = graph.call_function(
                torch.ops.aten.constant_pad_nd.default, (node.args[position], [0, 0, 0, 1])
            )
        with graph.inserting_after(node):
            product = graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, 0, -1))
        node.replace_all_uses_with(product, delete_user_cb=lambda user, product=product: user is not product)
        node.update_arg(position, padded)


def _has_effect(node: Node) -> bool:
    """Return whether a node matters without users: not if it writes to a new tensor that only it uses."""
    if not node.is_impure():
        return False
    written = node.args[0] if node.args else None
    if not isinstance(written, Node) or written.op != "call_function" or list(written.users) != [node]:
        return True
    return any(isinstance(each.meta.get("val"), Tensor) for each in written.all_input_nodes)


def _example(spec: InputSpec) -> tuple[Tensor, list[bool]]:
    """Return a tensor as the spec says, and which of its sizes differ from call to call."""
    sizes = [_EXAMPLE_SIZES[size] if isinstance(size, str) else size for size in spec.sizes]
    tensor = torch.empty(sizes, dtype=getattr(torch, spec.dtype))
    return tensor, [isinstance(size, str) for size in spec.sizes]

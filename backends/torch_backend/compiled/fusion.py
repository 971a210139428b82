"""Fusion in traced graphs: norms, gates and residuals move into products, rotary embedding into attention.

This module knows patterns of torch's operators and the kernels' arguments for them, and nothing of models: a
graph that looks different stays as it is. A kernel does on all cores what would otherwise be a small loop on
one of them, and rounds where the loop would.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from backends.torch_backend.native.kernels import BLOCK
from backends.torch_backend.torch_private.inductor import (
    MULTIPLE,
    CallFunction,
    Ignored,
    KeywordArg,
    PatternExpr,
    is_match,
    statically_known_true,
    to_copy,
)

_aten = torch.ops.aten
_linear = torch.ops.snapserve.linear.default
_rotate = torch.ops.snapserve.rotate.default
_slot_attention = torch.ops.snapserve.slot_attention.default
_sparse_attention = torch.ops.snapserve.sparse_attention.default
_SLICE_END = 2**63 - 1  # of a slice to a tensor's end


@dataclass(frozen=True, slots=True)
class _Rule:
    """A pattern, and its rewrite: called with the last node of a match and the pattern's named parts."""

    pattern: PatternExpr
    rewrite: Callable[..., None]


def fuse(graph: Graph) -> None:
    """Rewrite a graph of torch's operators and the native kernels'. Its nodes have example values."""
    for rule in _RULES:
        for node in list(graph.nodes):
            match = rule.pattern.match(node)
            # A pattern of `add` also matches one whose second operand is scaled by `alpha`.
            if is_match(match) and not any("alpha" in part.kwargs for part in match.nodes):
                rule.rewrite(node, **match.kwargs)
        graph.eliminate_dead_code()


def _norm_pattern(*, is_cast: bool) -> PatternExpr:
    """A root-mean-square norm of float32 rows, or of rows that are cast to it and then back."""
    rows: PatternExpr = KeywordArg("rows")
    if is_cast:
        rows = CallFunction(to_copy, rows, dtype=torch.float32, _users=2)
    mean = CallFunction(_aten.mean.dim, CallFunction(_aten.pow.Tensor_Scalar, rows, 2), [-1], True)
    factor = CallFunction(_aten.rsqrt.default, CallFunction(_aten.add.Tensor, mean, KeywordArg("epsilon")))
    normed = CallFunction(_aten.mul.Tensor, rows, factor)
    if is_cast:
        normed = CallFunction(to_copy, normed, dtype=torch.bfloat16)
    return CallFunction(_aten.mul.Tensor, KeywordArg("weight"), normed)


def _gate_pattern() -> PatternExpr:
    """The SiLU of a product's first half times its second half."""
    halves = CallFunction(
        _aten.split_with_sizes.default, KeywordArg("linear"), KeywordArg("sizes"), -1, _users=2
    )
    first, second = (CallFunction(operator.getitem, halves, index) for index in range(2))
    return CallFunction(_aten.mul.Tensor, CallFunction(_aten.silu.default, first), second)


def _rotary_pattern() -> PatternExpr:
    """Rotary embedding of heads whose two halves are the coordinates of rotations."""
    heads = KeywordArg("heads")
    half = KeywordArg("half")
    cosines, sines = (
        CallFunction(_aten.unsqueeze.default, KeywordArg(name), 1, _users=MULTIPLE)
        for name in ("cosines", "sines")
    )
    first = CallFunction(_aten.slice.Tensor, heads, 3, 0, half)
    second = CallFunction(_aten.slice.Tensor, heads, 3, half, _SLICE_END)
    rotated = CallFunction(_aten.cat.default, [CallFunction(_aten.neg.default, second), first], -1)
    return CallFunction(
        _aten.add.Tensor,
        CallFunction(_aten.mul.Tensor, heads, cosines),
        CallFunction(_aten.mul.Tensor, rotated, sines),
    )


def _attention_pattern(attention: Callable[..., Tensor], num_arguments: int) -> PatternExpr:
    """A decode step's attention of rotated queries and keys, with further arguments."""
    query, key = (
        CallFunction(_rotate, KeywordArg(name), KeywordArg("cosines"), KeywordArg("sines"))
        for name in ("query", "key")
    )
    return CallFunction(attention, query, key, *[Ignored() for _ in range(num_arguments)])


def _fuse_norm(node: Node, rows: Node, weight: Node, epsilon: float) -> None:
    """Make the norm a prologue of the product that reads the normalised rows."""
    users = list(node.users)
    if len(users) != 1 or not _can_take_epilogue(users[0]) or users[0].args[0] is not node:
        return
    if _value(node).dtype is _value(rows).dtype is _value(weight).dtype and _value(weight).dim() == 1:
        users[0].update_arg(0, rows)
        users[0].kwargs = {**users[0].kwargs, "norm": weight, "epsilon": epsilon}


def _fuse_gate(node: Node, linear: Node, sizes: list[int]) -> None:
    """Make the gate an epilogue of its product, if no other node reads the product."""
    is_only_use = _can_take_epilogue(linear) and len(linear.users) == 1
    # The kernel pairs whole blocks of the two halves.
    if is_only_use and sizes[0] == sizes[1] and sizes[0] % BLOCK == 0:
        _with_epilogue(node, linear, is_gated=True)


def _fuse_residual(node: Node, left: Any, right: Any) -> None:
    """Make a sum an epilogue of the product that is one of its operands."""
    # Either operand may be the product. If both are, one of them stays a product that the other adds.
    for linear, residual in ((right, left), (left, right)):
        is_only_use = _can_take_epilogue(linear) and len(linear.users) == 1
        if is_only_use and isinstance(residual, Node) and _same_type(residual, linear):
            _with_epilogue(node, linear, residual=residual)
            break


def _fuse_rotary(node: Node, heads: Node, cosines: Node, sines: Node, half: int) -> None:
    rows, _, tokens, width = _value(heads).shape
    angles = [_value(angle) for angle in (cosines, sines)]
    has_angles = all(
        value.dtype is _value(heads).dtype and _same_sizes(value.shape, (rows, tokens, width))
        for value in angles
    )
    if has_angles and width == 2 * half:
        _replace(node, _rotate, heads, cosines, sines)


def _fuse_rotary_into_attention(node: Node, query: Node, key: Node, cosines: Node, sines: Node) -> None:
    node.args = (query, key, *node.args[2:])
    node.kwargs = {"cosines": cosines, "sines": sines}


def _can_take_epilogue(node: Any) -> bool:
    """Return whether a node is a product without an epilogue. A prologue would come before one."""
    return (
        isinstance(node, Node)
        and node.target is _linear
        and not {"residual", "is_gated"} & node.kwargs.keys()
    )


def _same_type(node: Node, other: Node) -> bool:
    return _value(node).dtype is _value(other).dtype and _same_sizes(_value(node).shape, _value(other).shape)


def _same_sizes(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(
        statically_known_true(size == other_size) for size, other_size in zip(shape, other, strict=True)
    )


def _value(node: Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _with_epilogue(node: Node, linear: Node, **arguments: Any) -> None:
    """Replace a node that reads a product by the product with that node's work as its epilogue."""
    _replace(node, _linear, *linear.args, **linear.kwargs, **arguments)


def _replace(node: Node, operator: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(operator, args, kwargs)
    fused.meta["val"] = _value(node)
    node.replace_all_uses_with(fused)


_RULES = (
    _Rule(_norm_pattern(is_cast=False), _fuse_norm),
    _Rule(_norm_pattern(is_cast=True), _fuse_norm),
    _Rule(_gate_pattern(), _fuse_gate),
    _Rule(CallFunction(_aten.add.Tensor, KeywordArg("left"), KeywordArg("right")), _fuse_residual),
    _Rule(_rotary_pattern(), _fuse_rotary),
    _Rule(_attention_pattern(_slot_attention, 11), _fuse_rotary_into_attention),
    _Rule(_attention_pattern(_sparse_attention, 15), _fuse_rotary_into_attention),
)

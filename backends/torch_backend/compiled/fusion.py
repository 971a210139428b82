"""What stands around the kernels in a graph, moved into them: norms, gates and residuals into products, rotary embedding into attention.

It knows patterns of torch's operators and the kernels' arguments for them, and nothing of models: whatever looks otherwise stays as it is.
A kernel does on all cores what would otherwise be a small loop on one of them, and rounds where the loop would.
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
)

_aten = torch.ops.aten
_linear, _rotate, _slot_attention = (
    getattr(torch.ops.snapserve, name).default for name in ("linear", "rotate", "slot_attention")
)
_END = 2**63 - 1  # of a slice


@dataclass(frozen=True, slots=True)
class _Rule:
    """What to look for, and what to do with the last node of what was found and with the pattern's named parts."""

    pattern: PatternExpr
    rewrite: Callable[..., None]


def fuse(graph: Graph) -> None:
    """Rewrite a graph of torch's operators and the kernels'. Its nodes know their values' shapes and types."""
    for rule in _RULES:
        for node in list(graph.nodes):
            match = rule.pattern.match(node)
            if is_match(match) and not any("alpha" in part.kwargs for part in match.nodes):
                rule.rewrite(node, **match.kwargs)
        graph.eliminate_dead_code()


def _norm(*, is_cast: bool) -> PatternExpr:
    """A root-mean-square norm: of float32, or of rows that are cast to it and back before they meet the norm's weight."""
    rows: PatternExpr = KeywordArg("rows")
    if is_cast:
        rows = CallFunction(_aten._to_copy.default, rows, dtype=torch.float32, _users=2)
    mean = CallFunction(_aten.mean.dim, CallFunction(_aten.pow.Tensor_Scalar, rows, 2), [-1], True)
    factor = CallFunction(_aten.rsqrt.default, CallFunction(_aten.add.Tensor, mean, KeywordArg("epsilon")))
    normed = CallFunction(_aten.mul.Tensor, rows, factor)
    if is_cast:
        normed = CallFunction(_aten._to_copy.default, normed, dtype=torch.bfloat16)
    return CallFunction(_aten.mul.Tensor, KeywordArg("weight"), normed)


def _gate() -> PatternExpr:
    halves = CallFunction(
        _aten.split_with_sizes.default, KeywordArg("linear"), KeywordArg("sizes"), -1, _users=2
    )
    first, second = (CallFunction(operator.getitem, halves, number) for number in range(2))
    return CallFunction(_aten.mul.Tensor, CallFunction(_aten.silu.default, first), second)


def _rotated() -> PatternExpr:
    """Heads whose halves are turned against each other."""
    heads, half = KeywordArg("heads"), KeywordArg("half")
    cosines, sines = (
        CallFunction(_aten.unsqueeze.default, KeywordArg(name), 1, _users=MULTIPLE)
        for name in ("cosines", "sines")
    )
    first = CallFunction(_aten.slice.Tensor, heads, 3, 0, half)
    second = CallFunction(_aten.slice.Tensor, heads, 3, half, _END)
    turned = CallFunction(_aten.cat.default, [CallFunction(_aten.neg.default, second), first], -1)
    return CallFunction(
        _aten.add.Tensor,
        CallFunction(_aten.mul.Tensor, heads, cosines),
        CallFunction(_aten.mul.Tensor, turned, sines),
    )


def _attention() -> PatternExpr:
    """A decode step's attention of rotated queries and keys."""
    query, key = (
        CallFunction(_rotate, KeywordArg(name), KeywordArg("cosines"), KeywordArg("sines"))
        for name in ("query", "key")
    )
    return CallFunction(_slot_attention, query, key, *[Ignored() for _ in range(8)])


def _normalise(node: Node, rows: Node, weight: Node, epsilon: float) -> None:
    users = list(node.users)
    if len(users) != 1 or not _is_open(users[0]) or users[0].args[0] is not node:
        return
    if _value(node).dtype is _value(rows).dtype is _value(weight).dtype and _value(weight).dim() == 1:
        users[0].update_arg(0, rows)
        users[0].kwargs = {**users[0].kwargs, "norm": weight, "epsilon": epsilon}


def _let_gate(node: Node, linear: Node, sizes: list[int]) -> None:
    if _is_open(linear) and len(linear.users) == 1 and sizes[0] == sizes[1] and sizes[0] % BLOCK == 0:
        _extend(node, linear, is_gated=True)


def _add(node: Node, left: Any, right: Any) -> None:
    for linear, residual in ((right, left), (left, right)):
        if (
            _is_open(linear)
            and len(linear.users) == 1
            and isinstance(residual, Node)
            and _is_alike(residual, linear)
        ):
            _extend(node, linear, residual=residual)
            break


def _turn(node: Node, heads: Node, cosines: Node, sines: Node, half: int) -> None:
    rows, _, tokens, width = _value(heads).shape
    angles = [_value(angle) for angle in (cosines, sines)]
    has_angles = all(
        value.dtype is _value(heads).dtype and _are_equal(value.shape, (rows, tokens, width))
        for value in angles
    )
    if has_angles and width == 2 * half:
        _replace(node, _rotate, heads, cosines, sines)


def _let_turn(node: Node, query: Node, key: Node, cosines: Node, sines: Node) -> None:
    node.args = (query, key, *node.args[2:])
    node.kwargs = {"cosines": cosines, "sines": sines}


def _is_open(node: Any) -> bool:
    """Return whether it is a product whose outputs nothing has been made of yet."""
    return (
        isinstance(node, Node)
        and node.target is _linear
        and not {"residual", "is_gated"} & node.kwargs.keys()
    )


def _is_alike(node: Node, other: Node) -> bool:
    return _value(node).dtype is _value(other).dtype and _are_equal(_value(node).shape, _value(other).shape)


def _are_equal(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(
        statically_known_true(size == size_) for size, size_ in zip(shape, other, strict=True)
    )


def _value(node: Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _extend(node: Node, linear: Node, **arguments: Any) -> None:
    """Let a product stand where something was made of it."""
    _replace(node, _linear, *linear.args, **linear.kwargs, **arguments)


def _replace(node: Node, operator: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(operator, args, kwargs)
    fused.meta["val"] = _value(node)
    node.replace_all_uses_with(fused)


_RULES = (
    _Rule(_norm(is_cast=False), _normalise),
    _Rule(_norm(is_cast=True), _normalise),
    _Rule(_gate(), _let_gate),
    _Rule(CallFunction(_aten.add.Tensor, KeywordArg("left"), KeywordArg("right")), _add),
    _Rule(_rotated(), _turn),
    _Rule(_attention(), _let_turn),
)

"""Fusion into the kernels: graphs with it give the same numbers, and similar patterns are not fused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from backends.torch_backend.compiled.trace import InputSpec, trace
from backends.torch_backend.model.quantized_linear import quantize
from backends.torch_backend.native.kernels import (
    in_blocks,
    kernels_are_supported,
    load_kernels,
    packed_linear,
    slot_attention,
)

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

DTYPES = [torch.float32, torch.bfloat16]
ROWS, HIDDEN, GATED, HEADS, KV_HEADS, ENTRIES = 5, 96, 192, 4, 2, 40
Function = Callable[..., Tensor]


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


@dataclass(frozen=True)
class Weight:
    """A weight as the product takes it."""

    packed: Tensor
    scales: Tensor | None
    num_outputs: int

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(hidden, self.packed, bias, self.num_outputs, self.scales)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(inputs: int, outputs: int, dtype: torch.dtype, *, is_quantized: bool = False) -> Weight:
    weight = _random(outputs, inputs, dtype=dtype, seed=outputs) * inputs**-0.5
    if not is_quantized:
        return Weight(in_blocks(weight, dtype).contiguous(), None, outputs)
    numbers, scales = quantize(weight)
    return Weight(
        in_blocks(numbers, dtype).contiguous(), torch.nn.functional.pad(scales, (0, -outputs % 64)), outputs
    )


def _fused(function: Function, inputs: Sequence[Tensor]) -> tuple[str, Function]:
    """Return a function's graph as text, and what runs it; each input's first size is open."""
    source = trace(
        function, [InputSpec.of(tensor, ("rows",) if tensor.shape[0] == ROWS else ()) for tensor in inputs]
    )
    scope: dict[str, Function | object] = {"torch": torch, "device": torch.device}
    exec(source.code, scope)
    forward = scope["forward"]
    assert callable(forward)
    return source.code, lambda *tensors: forward(None, *tensors)


def _assert_alike(actual: Tensor, expected: Tensor) -> None:
    """Equal but for sums in another order: one step of bfloat16 in few places."""
    assert actual.shape == expected.shape
    limit = 1e-5 if actual.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=limit / 8, rtol=limit)
    assert (actual != expected).float().mean() < (1 if actual.dtype is torch.float32 else 0.02)


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    rows = hidden.to(torch.float32)
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)).to(hidden.dtype)


def _block(hidden: Tensor, norm: Tensor, up: Weight, down: Weight, *, activation: Function = silu) -> Tensor:
    gate, value = torch.split(up(_norm(hidden, norm)), [up.num_outputs // 2] * 2, dim=-1)
    return hidden + down(activation(gate) * value)


@pytest.mark.parametrize("num_tokens", [1, 15])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_norm_gate_and_residual(dtype: torch.dtype, is_quantized: bool, num_tokens: int) -> None:
    up, down = (
        _weight(*sizes, dtype, is_quantized=is_quantized) for sizes in ((HIDDEN, 2 * GATED), (GATED, HIDDEN))
    )
    hidden, norm = (
        _random(ROWS, num_tokens, HIDDEN, dtype=dtype),
        1 + _random(HIDDEN, dtype=dtype, seed=1) / 8,
    )
    tensors = [
        tensor
        for tensor in (hidden, norm, up.packed, up.scales, down.packed, down.scales)
        if tensor is not None
    ]

    def block(hidden: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        given = iter(weights)
        own = [
            Weight(next(given), next(given) if is_quantized else None, weight.num_outputs)
            for weight in (up, down)
        ]
        return _block(hidden, norm, own[0], own[1])

    code, run = _fused(block, tensors)
    assert [code.count(text) for text in ("norm = arg1", "is_gated = True", "residual = arg0", "aten.")] == [
        1,
        1,
        1,
        0,
    ]
    whole = run(*tensors)
    _assert_alike(whole, block(*tensors))
    for first, last in ((0, 1), (1, 5)):
        assert torch.equal(run(hidden[first:last], *tensors[1:]), whole[first:last]), (
            "a row does not depend on the others"
        )


def _half_turned(heads: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    return torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return heads * cosines + _half_turned(heads) * sines


def _attention_inputs(dtype: torch.dtype, width: int, num_angles: int) -> list[Tensor]:
    """Queries, keys and values of a joined product, the angles, two planes, and the plan of a step."""
    joint = _random(ROWS, 1, (HEADS + 2 * KV_HEADS) * width, dtype=dtype)
    angles = torch.arange(ROWS)[:, None, None] * torch.linspace(1, 0.01, num_angles // 2).repeat(2)
    planes = [_random(ROWS + 1, KV_HEADS, ENTRIES + 1, width, dtype=dtype, seed=seed) for seed in (1, 2)]
    entries = torch.arange(ROWS)[:, None] * 3
    bias = torch.where(torch.arange(ENTRIES) > entries, -3e38, 0.0)[:, None]
    return [joint, angles.cos().to(dtype), angles.sin().to(dtype), *planes, entries, bias]


def _attention(rotate: Function) -> Function:
    def run(
        joint: Tensor,
        cosines: Tensor,
        sines: Tensor,
        keys: Tensor,
        values: Tensor,
        entries: Tensor,
        bias: Tensor,
    ) -> Tensor:
        heads = joint.view(joint.shape[0], 1, HEADS + 2 * KV_HEADS, -1).transpose(1, 2)
        query, key, value = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        return slot_attention(
            query, key, value, (keys, values), entries, bias, scaling=0.3, softcap=None, sinks=None
        )

    return run


@pytest.mark.parametrize("width", [64, 40, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rotary_embedding(dtype: torch.dtype, width: int) -> None:
    tensors = _attention_inputs(dtype, width, width)
    code, run = _fused(_attention(_rotated), tensors)
    assert [
        code.count(text) for text in ("cosines = cosines_1", "sines = sines_1", "aten.cat", "aten.mul")
    ] == [1, 1, 0, 0]
    planes = [plane.clone() for plane in tensors[3:5]]
    expected = _attention(_rotated)(*tensors)
    _assert_alike(run(*tensors[:3], *planes, *tensors[5:]), expected)
    for plane, other in zip(planes, tensors[3:5], strict=True):
        _assert_alike(plane, other)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rotary_embedding_of_a_chunk(dtype: torch.dtype) -> None:
    """Where no decode step's attention follows, it is an operator of its own."""
    heads, angles = _random(ROWS, HEADS, 7, 40, dtype=dtype), _random(ROWS, 7, 40, dtype=dtype, seed=1)

    def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        return _rotated(heads, cosines.unsqueeze(1), sines.unsqueeze(1)) + 1

    code, run = _fused(turned, [heads, angles.cos(), angles.sin()])
    assert [code.count(text) for text in ("snapserve.rotate", "aten.cat", "aten.mul")] == [1, 0, 0]
    _assert_alike(run(heads, angles.cos(), angles.sin()), turned(heads, angles.cos(), angles.sin()))


def _partly_rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    size = cosines.shape[-1]
    return torch.cat([_rotated(heads[..., :size], cosines, sines), heads[..., size:]], dim=-1)


def _turned_in_pairs(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2)
    return heads * cosines + turned * sines


@pytest.mark.parametrize(
    ("rotate", "num_angles", "num_fused"), [(_partly_rotated, 16, 2), (_turned_in_pairs, 40, 0)]
)
@torch.inference_mode()
def test_other_embeddings_stay(rotate: Function, num_angles: int, num_fused: int) -> None:
    """Of heads that turn in part, this part does not."""
    tensors = _attention_inputs(torch.float32, 40, num_angles)
    code, run = _fused(_attention(rotate), tensors)
    assert "cosines =" not in code
    assert code.count("snapserve.rotate") == num_fused
    torch.testing.assert_close(run(*tensors), _attention(rotate)(*tensors))


def _with_its_norm_added(hidden: Tensor, norm: Tensor, up: Weight, down: Weight) -> Tensor:
    normed = _norm(hidden, norm)
    return normed + down(up(normed)[..., :GATED])


def _scaled(hidden: Tensor, norm: Tensor, up: Weight, down: Weight) -> Tensor:
    rows = hidden.float()
    normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + norm)).to(hidden.dtype)
    return hidden + down(up(normed)[..., :GATED]) * 0.5


def _with_gelu(hidden: Tensor, norm: Tensor, up: Weight, down: Weight) -> Tensor:
    return _block(hidden, norm, up, down, activation=gelu)


def _unevenly_gated(hidden: Tensor, norm: Tensor, up: Weight, down: Weight) -> Tensor:
    gate, value, _ = torch.split(up(_norm(hidden, norm)), [GATED - 1, GATED - 1, 2], dim=-1)
    return hidden + down(torch.nn.functional.pad(silu(gate) * value, (0, 1)))


def _broadcast(hidden: Tensor, norm: Tensor, up: Weight, down: Weight) -> Tensor:
    return norm + torch.add(hidden, down(up(_norm(hidden, norm))[..., :GATED]), alpha=2)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (_with_its_norm_added, (0, 0, 1)),
        (_scaled, (0, 0, 0)),
        (_with_gelu, (1, 0, 1)),
        (_unevenly_gated, (1, 0, 1)),
        (_broadcast, (1, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_similar_patterns_are_not_fused(
    block: Function, expected: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The rest of the graph is rewritten all the same, and the numbers are right."""
    up, down = _weight(HIDDEN, 2 * GATED, dtype), _weight(GATED, HIDDEN, dtype)
    tensors = [
        _random(ROWS, 1, HIDDEN, dtype=dtype),
        _random(HIDDEN, dtype=dtype, seed=1),
        up.packed,
        down.packed,
    ]

    def whole(hidden: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        own = [
            Weight(packed, None, weight.num_outputs)
            for packed, weight in zip(weights, (up, down), strict=True)
        ]
        return block(hidden, norm, *own)

    code, run = _fused(whole, tensors)
    assert tuple(code.count(text) for text in ("norm =", "is_gated", "residual =")) == expected
    _assert_alike(run(*tensors), whole(*tensors))


@torch.inference_mode()
def test_products_that_do_not_fit_are_refused() -> None:
    weight, hidden = _weight(HIDDEN, GATED, torch.float32), _random(ROWS, HIDDEN, dtype=torch.float32)
    for message, argument in (
        ("norm must have shape", {"norm": hidden[0, 1:]}),
        ("residual must have shape", {"residual": hidden}),
        ("num_products must be a multiple of 128 when is_gated", {"is_gated": True}),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.snapserve.linear(hidden, weight.packed, None, None, GATED, **argument)

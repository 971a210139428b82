"""Linear layers with weights of 4 bits, in groups of inputs that share a scale and a zero point.

A weight is its scale times the difference of its level, 0 to 15, and its zero point. Rows are quantized to
int8, with one scale for each group: products of integers are exact, and the processor's fastest. Without the
kernels, each call converts the weight, a part at a time. That gives the same results and is slower.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.torch_backend.model.quantized_linear import QuantizedLinear, quantized_rows
from backends.torch_backend.native.kernels import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    STEPS,
    Kernels,
    in_groups,
    packed_linear,
    taken_from_groups,
)

_MOST = 15  # level
_SPANS = (1.0, 0.92, 0.84)  # of a group's range, that the levels cover at first
# Weights. On a CPU, their copies in float32 stay in the cache, and are smaller than the blocks that
# `returning_memory` maps anew for each tensor: page faults would take most of the time.
_QUANTIZED_AT_ONCE = 2**16
_QUANTIZED_AT_ONCE_ELSEWHERE = 2**22
_CONVERTED_AT_ONCE = 2**22  # weights


class GroupedLinear(nn.Module):
    """The outputs of one or several linear layers, side by side.

    With the kernels, a row's output does not depend on the other rows.
    """

    weight: Tensor  # as of `in_groups`
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._num_outputs = weight.shape[0]
        self._kernels = kernels
        self._is_packable = QuantizedLinear.is_packable(weight)
        self.register_buffer("weight", quantize_in_groups(weight, kernels), persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        return linear.weight.is_floating_point() and linear.in_features % GROUP == 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_packable and self._kernels.are_used:
            return packed_linear(hidden, self.weight, self.bias, self._num_outputs)
        product = grouped_product(hidden.flatten(0, -2), self.weight)
        output = product[:, : self._num_outputs].view(*hidden.shape[:-1], -1)
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)


def quantize_in_groups(weight: Tensor, kernels: Kernels) -> Tensor:
    """Return a weight [output, input] in groups of 4 bits, as `in_groups` packs them.

    The scales and zero points are those of the least squared error among a few. Weights that are not finite
    make outputs NaN.
    """
    if kernels.can_quantize and QuantizedLinear.is_packable(weight):  # the same bits in a tenth of the time
        quantized: Tensor = torch.ops.snapserve.quantize_in_groups(weight)
        return quantized
    num_outputs, num_inputs = weight.shape
    packed = weight.new_empty(-(-num_outputs // BLOCK), num_inputs // GROUP, GROUP_BYTES, dtype=torch.uint8)
    at_once = _QUANTIZED_AT_ONCE if weight.device.type == "cpu" else _QUANTIZED_AT_ONCE_ELSEWHERE
    blocks = max(1, at_once // (BLOCK * num_inputs))
    parts = zip(torch.split(weight, blocks * BLOCK), torch.split(packed, blocks), strict=True)
    for some, some_packed in parts:
        whole = nn.functional.pad(some, (0, 0, 0, -some.shape[0] % BLOCK))
        groups = torch.split(whole.reshape(-1, GROUP), at_once // GROUP)
        # The group's inputs first: sums over them then are sums of vectors.
        fitted = [_fitted(each.float().T.contiguous()) for each in groups]
        levels, scales, zero_points = (torch.cat(each, dim=-1) for each in zip(*fitted, strict=True))
        some_packed.copy_(in_groups(levels, scales, zero_points, num_inputs))
    return packed


def grouped_product(rows: Tensor, packed: Tensor) -> Tensor:
    """Return the float32 product of `rows` [row, input], which it quantizes, with what `in_groups` packed."""
    rows = quantized_rows(rows)
    blocks = max(1, _CONVERTED_AT_ONCE // (BLOCK * rows.shape[1]))
    parts = torch.split(packed, blocks)
    return torch.cat([nn.functional.linear(rows, dequantize_groups(part)) for part in parts], dim=1)


def dequantize_groups(packed: Tensor) -> Tensor:
    """Return the weights [output, input] in float32 that `in_groups` packed. Outputs are whole blocks."""
    levels, scales, zero_points = taken_from_groups(packed)
    return ((levels - zero_points / STEPS) * scales.float()).flatten(1)


def _fitted(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels [input, group], scales and zero points [group] for `groups` [input, group] in float32."""
    # Zero is in the range, and a zero point is a level.
    low, high = groups.amin(0).clamp_(max=0), groups.amax(0).clamp_(min=0)
    centre = (low + high) / 2
    means = groups.mean(0)
    best: tuple[Tensor, ...] | None = None
    for span in _SPANS:
        scales = (high - low) * (span / _MOST)
        scales, zero_points = _stored(scales, scales * (_MOST / 2) - centre)
        levels = _levels(groups, scales, zero_points)
        best = _nearer(best, _errors(groups, levels, scales, zero_points), scales, zero_points)
        # The scale and the zero point of the least squared error for these levels, then levels for them. They
        # are worse where the zero point is at the end of its range.
        mean_levels = levels.mean(0)
        spread = levels.square().mean(0) - mean_levels.square()
        products = (levels * groups).mean(0) - mean_levels * means
        scales = torch.where(spread > 0, products / spread, scales)
        scales, zero_points = _stored(scales, scales * mean_levels - means)
        levels = _levels(groups, scales, zero_points)
        best = _nearer(best, _errors(groups, levels, scales, zero_points), scales, zero_points)
    assert best is not None
    _, scales, zero_points = best
    levels = _levels(groups, scales, zero_points)
    scales = scales.where(means.isfinite(), torch.nan)
    return levels.to(torch.uint8), scales.to(torch.bfloat16), zero_points.to(torch.uint8)


def _nearer(best: tuple[Tensor, ...] | None, *fitted: Tensor) -> tuple[Tensor, ...]:
    """Return squared errors, scales and zero points: for each group the better of two fits."""
    if best is None:
        return fitted
    is_better = fitted[0] < best[0]
    return tuple(torch.where(is_better, new, old) for new, old in zip(fitted, best, strict=True))


def _errors(groups: Tensor, levels: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    return (levels - zero_points / STEPS).mul_(scales).sub_(groups).square_().sum(0)


def _stored(scales: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales, and zero points in steps, as they are stored, for the values of level 0: `-offsets`."""
    scales = scales.clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16).float()
    return scales, (offsets / scales).mul_(STEPS).round_().clamp_(0, 255)


def _levels(groups: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    return (groups * scales.reciprocal()).add_(zero_points / STEPS).round_().clamp_(0, _MOST)

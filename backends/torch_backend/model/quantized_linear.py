"""Linear layers with int8 weights and one scale for each output. Rows are in the model's dtype or int8 too.

Integers up to 127 are exact in bfloat16 and float32, so a product sums the quantized numbers in float32 and
scales the sum once. Without the kernels, each call converts the weight, a part at a time, which is slower. On
a CPU that gives the same results but for the last bits. On a GPU the sum is rounded to the rows' type.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.torch_backend.native.kernels import (
    BLOCK,
    GROUP,
    Kernels,
    in_blocks,
    kernels_are_supported,
    packed_linear,
)

_LARGEST = 127  # -128 is left out, for symmetry
_ZERO_POINT = 128  # of weights for int8 rows: one operand of the processor's product is unsigned
_MAX_INPUTS = 2**16  # of int8 rows: the kernels' sums fit 32 bits
_OUTPUTS_AT_ONCE = 1024  # outputs that are float32 at once during quantization
_BYTES_PER_INPUT = 2**13  # that are converted at once: the copy is small beside the weight


class QuantizedLinear(nn.Module):
    """The outputs of one or several linear layers, side by side.

    With the kernels, a row's output does not depend on the other rows.
    """

    # [output, input], padded to whole blocks of outputs. In the kernels' layout as soon as these are used.
    weight: Tensor
    scales: Tensor  # [output]
    bias: Tensor | None

    rows_are_quantized = False
    rows_are_grouped = False  # quantized, with a scale for each group of inputs

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        numbers, scales = quantize_weight(weight, for_quantized_rows=self.rows_are_quantized)
        self._num_outputs = weight.shape[0]
        self._dtype = weight.dtype
        self._kernels = kernels
        self.register_buffer(
            "weight", nn.functional.pad(numbers, (0, 0, 0, -self._num_outputs % BLOCK)), persistent=False
        )
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)
        self._is_packable = self.is_packable(weight)
        if self._is_packable:
            kernels.when_used(self._pack)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        return linear.weight.is_floating_point()

    @classmethod
    def is_packable(cls, weight: Tensor) -> bool:
        """Return whether the kernels support such a weight.

        They load inputs in pairs of bfloat16 and groups of four int8.
        """
        is_known = weight.dtype in (torch.float32, torch.bfloat16)
        is_whole = weight.shape[1] % (4 // cls._row_dtype(weight.dtype).itemsize) == 0
        if cls.rows_are_quantized and weight.shape[1] > _MAX_INPUTS:
            return False
        return is_known and is_whole and weight.device.type == "cpu" and kernels_are_supported()

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_packable and self._kernels.are_used:
            return packed_linear(
                hidden,
                self.weight,
                self.bias,
                self._num_outputs,
                self.scales,
                rows_in_groups=self.rows_are_grouped,
            )
        # Two dimensions: for three, torch would copy the weight for each batch entry.
        rows = hidden.reshape(-1, hidden.shape[-1])
        weight = self.weight[: self._num_outputs]
        product = quantized_product(rows, weight, self.scales, in_groups=self.rows_are_grouped)
        output = product.view(*hidden.shape[:-1], -1)
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)

    def _pack(self) -> None:
        """Convert the weight to the kernels' layout in place. Graphs traced before refer to this tensor."""
        self.weight.copy_(in_blocks(self.weight, self._row_dtype(self._dtype)).reshape(self.weight.shape))

    @classmethod
    def _row_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if cls.rows_are_quantized else dtype


class QuantizedProduct(QuantizedLinear):
    """A `QuantizedLinear` that quantizes each row to int8 too, with one scale. It sums integer products."""

    rows_are_quantized = True


class GroupedProduct(QuantizedProduct):
    """A `QuantizedProduct` whose rows have a scale for each group of 32 inputs, for the kernels alone."""

    rows_are_grouped = True

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        return QuantizedProduct.is_packable(linear.weight) and linear.in_features % GROUP == 0


def quantize_weight(weight: Tensor, *, for_quantized_rows: bool) -> tuple[Tensor, Tensor]:
    """Return a weight [output, input] as int8, or as uint8 for rows of int8, and a scale for each output."""
    numbers = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
    # One buffer for all parts: while a model is loaded, new ones would cost page faults.
    values = weight.new_empty(min(_OUTPUTS_AT_ONCE, weight.shape[0]), weight.shape[1], dtype=torch.float32)
    parts = (torch.split(tensor, _OUTPUTS_AT_ONCE) for tensor in (weight, numbers, scales))
    for some, some_numbers, some_scales in zip(*parts, strict=True):
        integers, part_scales = _quantize(values[: some.shape[0]].copy_(some))
        some_numbers.copy_(integers)
        some_scales.copy_(part_scales)
    if for_quantized_rows:
        numbers = numbers.view(torch.uint8).bitwise_xor_(_ZERO_POINT)  # adds it, since it is 128
    return numbers, scales


def quantized_product(rows: Tensor, weight: Tensor, scales: Tensor, *, in_groups: bool = False) -> Tensor:
    """Return the float32 product of `rows` [row, input] with what `quantize_weight` returned.

    A weight of uint8 is multiplied by quantized rows. With `in_groups`, these have a scale for each group.
    """
    # A sum in bfloat16 would be rounded before it is scaled and meets its bias. On a GPU, products in float32
    # are too slow for that. A CPU with AVX2 alone multiplies one row in 1.5 times the time of bfloat16, and
    # 64 rows in a third of it.
    dtype = torch.float32 if rows.device.type == "cpu" else rows.dtype
    zero_point = _ZERO_POINT if weight.dtype is torch.uint8 else 0
    if in_groups:
        rows = quantized_rows(rows)
    elif weight.dtype is torch.uint8:
        rows, row_scales = quantize(rows)
        scales = scales * row_scales[:, None]
    rows = rows.to(dtype)
    parts = parts_of(weight, dtype)
    sums = torch.cat([nn.functional.linear(rows, part.to(dtype) - zero_point) for part in parts], dim=1)
    return sums * scales


def parts_of(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the parts in which a weight [output, input] is converted to `dtype`."""
    return torch.split(weight, _BYTES_PER_INPUT // dtype.itemsize)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [row, input] as int8, and a float32 scale for each row.

    The scale is 1/127 of the row's largest magnitude. The error of a number is at most half a scale.
    """
    integers, scales = _quantize(rows.to(torch.float32, copy=True))
    return integers.to(torch.int8), scales


def quantized_rows(rows: Tensor) -> Tensor:
    """Return rows [..., input] with the values of their int8 numbers, in float32. Each group has a scale."""
    numbers, scales = quantize(rows.reshape(-1, GROUP))
    return (numbers.float() * scales[:, None]).view(rows.shape)


def _quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `quantize`, in place: the integers are float32."""
    scales = torch.maximum(values.amax(1), -values.amin(1)).abs_().div_(_LARGEST)
    factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    return values.mul_(factors[:, None]).round_(), scales

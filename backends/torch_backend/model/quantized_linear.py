"""Linear layers whose weights are kept as int8, with one scale for each output, and whose rows stay in the model's type or become int8 too.

Whole numbers up to 127 are exact in bfloat16, so a product's sums are those of the numbers as they are kept, and are scaled at the end.
Until the kernels are there, and where they cannot be, each product makes itself copies of its weight, a part at a time: right, and slower.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.torch_backend.native.kernels import (
    BLOCK,
    Kernels,
    in_blocks,
    kernels_are_supported,
    packed_linear,
)

_LARGEST = 127  # -128 is left out, for symmetry
_ABOVE = 128  # how far weights that meet int8 rows lie above their values: the processor's product takes one side without a sign
_MOST_INPUTS = 2**16  # of int8 rows: the kernels' sums stay within 32 bits
_OUTPUTS_AT_ONCE = 1024  # while they are float32
_COPIED_AT_ONCE = 4096  # outputs: a part that stays in a cache is multiplied at once, and memory that was never used need not be fetched


class QuantizedLinear(nn.Module):
    """The outputs of one or several linear layers, side by side. Through the kernels, a row's do not depend on the other rows."""

    weight: (
        Tensor  # [output, input], outputs filled up to whole blocks; in the kernels' order once they are used
    )
    scales: Tensor  # [output]
    bias: Tensor | None

    rows_are_quantized = False

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        numbers, scales = quantize(weight)
        if self.rows_are_quantized:
            numbers = (numbers.to(torch.int16) + _ABOVE).to(torch.uint8)
        self._num_outputs, self._dtype, self._kernels = weight.shape[0], weight.dtype, kernels
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
        """Return whether the kernels take such a weight: inputs lie side by side in pairs of bfloat16 and fours of int8."""
        is_known = weight.dtype in (torch.float32, torch.bfloat16)
        is_whole = weight.shape[1] % (4 // cls._row_dtype(weight.dtype).itemsize) == 0
        if cls.rows_are_quantized and weight.shape[1] > _MOST_INPUTS:
            return False
        return is_known and is_whole and weight.device.type == "cpu" and kernels_are_supported()

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_packable and self._kernels.are_used:
            return packed_linear(hidden, self.weight, self.bias, self._num_outputs, self.scales)
        rows = hidden.reshape(
            -1, hidden.shape[-1]
        )  # of rows that lie apart torch would make products with a copy of the weight each
        scales = self.scales
        if self.rows_are_quantized:
            numbers, row_scales = quantize(rows)
            rows, scales = numbers.to(rows.dtype), scales * row_scales[:, None]
        above = _ABOVE if self.rows_are_quantized else 0
        parts = torch.split(self.weight[: self._num_outputs], _COPIED_AT_ONCE)
        sums = torch.cat([nn.functional.linear(rows, part.to(rows.dtype) - above) for part in parts], dim=1)
        output = (sums * scales).view(*hidden.shape[:-1], -1)
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)

    def _pack(self) -> None:
        """Lay the weight out for the kernels, where it lies: graphs that were traced before know this tensor."""
        self.weight.copy_(in_blocks(self.weight, self._row_dtype(self._dtype)).reshape(self.weight.shape))

    @classmethod
    def _row_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if cls.rows_are_quantized else dtype


class QuantizedProduct(QuantizedLinear):
    """The same with each row as int8 too, with a scale of its own, made as it comes: what is summed are products of whole numbers."""

    rows_are_quantized = True


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [row, number] as int8 and a float32 scale of each, a 127th of its largest: their product is half a scale off at most."""
    scales = rows.new_empty(rows.shape[0], dtype=torch.float32)
    numbers = torch.empty_like(rows, dtype=torch.int8)
    for some, own_scales, own_numbers in zip(
        *(torch.split(tensor, _OUTPUTS_AT_ONCE) for tensor in (rows, scales, numbers)), strict=True
    ):
        own_scales.copy_(some.abs().amax(1)).div_(_LARGEST)
        own_numbers.copy_(
            (some * own_scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()[:, None]).round_()
        )
    return numbers, scales

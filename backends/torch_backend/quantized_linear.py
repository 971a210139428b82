"""Linear layers whose weights are kept as int8, with one scale for each output; what they multiply stays in the model's own type.

Whole numbers up to 127 are exact in bfloat16, so a product's sums are those of the numbers as they are kept, and are scaled at the end.
Until the kernels are there, and where they cannot be, each product makes itself copies of its weight, a part at a time: right, and slower.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.torch_backend.kernels import BLOCK, Kernels, in_blocks, kernels_are_supported, packed_linear

_LARGEST = 127  # -128 is left out, for symmetry
_OUTPUTS_AT_ONCE = 1024  # while they are float32
_COPIED_AT_ONCE = 4096  # outputs: a part that stays in a cache is multiplied at once, and memory that was never used need not be fetched


class QuantizedLinear(nn.Module):
    """The outputs of one or several linear layers, side by side. Through the kernels, a row's do not depend on the other rows."""

    weight: Tensor  # [output, input], outputs filled up to whole blocks; in the kernels' order once they are used
    scales: Tensor  # [output]
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        numbers, scales = quantize(weight)
        self._num_outputs, self._dtype, self._kernels = weight.shape[0], weight.dtype, kernels
        self.register_buffer("weight", nn.functional.pad(numbers, (0, 0, 0, -self._num_outputs % BLOCK)), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)
        self._is_packable = self.is_packable(weight)
        if self._is_packable:
            kernels.when_used(self._pack)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        return linear.weight.is_floating_point()

    @staticmethod
    def is_packable(weight: Tensor) -> bool:
        """Return whether the kernels take such a weight: pairs of bfloat16 need an even number of inputs."""
        is_known = weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0)
        return is_known and weight.device.type == "cpu" and kernels_are_supported()

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_packable and self._kernels.are_used:
            return packed_linear(hidden, self.weight, self.bias, self._num_outputs, self.scales)
        rows = hidden.reshape(-1, hidden.shape[-1])  # of rows that lie apart torch would make products with a copy of the weight each
        parts = torch.split(self.weight[: self._num_outputs], _COPIED_AT_ONCE)
        sums = torch.cat([nn.functional.linear(rows, part.to(rows.dtype)) for part in parts], dim=1)
        output = (sums * self.scales).view(*hidden.shape[:-1], -1)
        return (output if self.bias is None else output + self.bias).to(hidden.dtype)

    def _pack(self) -> None:
        """Lay the weight out for the kernels, where it lies: graphs that were traced before know this tensor."""
        self.weight.copy_(in_blocks(self.weight, self._dtype).reshape(self.weight.shape))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [output, input] as int8 and the float32 scale of each output: their product is at most half a scale off."""
    scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
    numbers = torch.empty_like(weight, dtype=torch.int8)
    for some, own_scales, own_numbers in zip(*(torch.split(tensor, _OUTPUTS_AT_ONCE) for tensor in (weight, scales, numbers)), strict=True):
        own_scales.copy_(some.abs().amax(1)).div_(_LARGEST)
        own_numbers.copy_((some / own_scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_())
    return numbers, scales

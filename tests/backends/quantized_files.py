"""Quantised weights as their makers store them: packers written from the formats' descriptions.

Each packer takes a weight [output, input] and returns the stored tensors by the ending of their names, and
the weight that they stand for, which is computed before anything is packed.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

GROUP: Final = 16  # inputs of a group
BLOCK: Final = 24  # rows and columns of a block: it divides no weight of the tiny models


class Packed(NamedTuple):
    tensors: dict[str, Tensor]
    weight: Tensor  # float32


def _scales(weight: Tensor, largest: float) -> Tensor:
    return weight.abs().amax(-1, keepdim=True).clamp(min=1e-6) / largest


def fp8_blocks(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    stored, plain = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            part = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            grid[row, column] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / grid[row, column]).to(torch.float8_e4m3fn)
            plain[part] = stored[part].float() * grid[row, column]
    return Packed({".weight": stored, ".weight_scale_inv": grid}, plain)


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return Packed(
        {".weight": stored, ".weight_scale": scale, ".input_scale": torch.ones(())}, stored.float() * scale
    )


def fp8_rows(weight: Tensor) -> Packed:
    scales = _scales(weight, 448).bfloat16()
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return Packed({".weight": stored, ".weight_scale": scales}, stored.float() * scales.float())


def int8_rows(weight: Tensor) -> Packed:
    scales = _scales(weight, 100)
    zeros = torch.arange(len(weight))[:, None] % 5 - 2
    numbers = torch.round(weight / scales) + zeros
    tensors = {
        ".weight": numbers.to(torch.int8),
        ".weight_scale": scales,
        ".weight_zero_point": zeros.to(torch.int8),
    }
    return Packed(tensors, (numbers - zeros) * scales)


def _grouped(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise to `bits` bits: numbers from 0, and each group's zero point and scale [output, group]."""
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(len(weight), num_groups), torch.empty(len(weight), num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, group] = ((high - low) / most).clamp(min=1e-6).half().float()
        # A stored zero point of GPTQ's first version is one less, and must not be negative.
        zeros[:, group] = torch.round(-low / scales[:, group]).clamp(1, most)
    numbers = (torch.round(weight / scales[:, groups]) + zeros[:, groups]).clamp(0, most)
    return numbers, zeros, scales, (numbers - zeros[:, groups]) * scales[:, groups]


def _packed_along(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack whole numbers into int32, in `order` if it is given."""
    count = 32 // bits
    numbers = numbers.movedim(dim, -1).long()
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % count))
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // count, dtype=torch.int64)
    for place, column in enumerate(order or range(count)):
        words |= numbers[..., column::count] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def _gptq(weight: Tensor, bits: int, offset: int, groups: Tensor) -> Packed:
    numbers, zeros, scales, plain = _grouped(weight, bits, groups)
    tensors = {
        ".qweight": _packed_along(numbers.T, bits, 0),
        ".qzeros": _packed_along(zeros.T - offset, bits, 1),
        ".scales": scales.T.half().contiguous(),
        ".g_idx": groups.to(torch.int32),
    }
    return Packed(tensors, plain)


def _in_order(weight: Tensor) -> Tensor:
    return torch.arange(weight.shape[1]) // GROUP


def _shuffled(weight: Tensor) -> Tensor:
    return _in_order(weight)[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))]


def gptq_4(weight: Tensor) -> Packed:
    return _gptq(weight, 4, 1, _shuffled(weight))


def gptq_8(weight: Tensor) -> Packed:
    return _gptq(weight, 8, 1, _in_order(weight))


def gptq_v2(weight: Tensor) -> Packed:
    packed = _gptq(weight, 4, 0, _in_order(weight))
    del packed.tensors[".g_idx"]
    return packed


def awq(weight: Tensor) -> Packed:
    numbers, zeros, scales, plain = _grouped(weight, 4, _in_order(weight))
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": _packed_along(numbers.T, 4, 1, order),
        ".qzeros": _packed_along(zeros.T, 4, 1, order),
        ".scales": scales.T.half().contiguous(),
    }
    return Packed(tensors, plain)


def _compressed(weight: Tensor, bits: int, *, is_symmetric: bool, groups: Tensor | None = None) -> Packed:
    index = _in_order(weight) if groups is None else groups
    numbers, zeros, scales, plain = _grouped(weight, bits, index)
    half = 2 ** (bits - 1)
    if is_symmetric:
        numbers = (torch.round(weight / scales[:, index]) + half).clamp(0, 2**bits - 1)
        plain = (numbers - half) * scales[:, index]
    tensors = {
        ".weight_packed": _packed_along(numbers, bits, 1),
        ".weight_scale": scales.half(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors[".weight_zero_point"] = _packed_along(zeros, bits, 0)
    if groups is not None:
        tensors[".weight_g_idx"] = groups.to(torch.int32)
    return Packed(tensors, plain)


def w4a16(weight: Tensor) -> Packed:
    return _compressed(weight, 4, is_symmetric=True)


def w4a16_asymmetric(weight: Tensor) -> Packed:
    return _compressed(weight, 4, is_symmetric=False, groups=_shuffled(weight))


def w8a16(weight: Tensor) -> Packed:
    return _compressed(weight, 8, is_symmetric=True)


class Kind(NamedTuple):
    pack: Callable[[Tensor], Packed]
    config: dict[str, Any]


def _compressed_config(format_: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}}


KINDS: Final[dict[str, Kind]] = {
    "fp8": Kind(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "fbgemm-fp8": Kind(fp8_rows, {"quant_method": "fbgemm_fp8"}),
    "modelopt-fp8": Kind(fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed-fp8": Kind(fp8_rows, _compressed_config("float-quantized", num_bits=8)),
    "compressed-w8a8": Kind(int8_rows, _compressed_config("int-quantized", num_bits=8)),
    "compressed-w4a16": Kind(w4a16, _compressed_config("pack-quantized", num_bits=4)),
    "compressed-w4a16-asymmetric": Kind(w4a16_asymmetric, _compressed_config("pack-quantized", num_bits=4)),
    "compressed-w8a16": Kind(w8a16, _compressed_config("pack-quantized", num_bits=8)),
    "gptq-4": Kind(gptq_4, {"quant_method": "gptq", "bits": 4}),
    "gptq-8": Kind(gptq_8, {"quant_method": "gptq", "bits": 8}),
    "gptq-v2": Kind(gptq_v2, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": Kind(awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
}

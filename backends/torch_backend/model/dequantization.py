"""Formats of quantised checkpoints: which stored tensors make a weight, and how.

A format is known by its tensors' names, as its makers' packages write them. This module knows no files: it
takes tensors, and gives a weight in the model's dtype. It computes in float32, some rows at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backends.torch_backend.errors import UnsupportedModelError

Parts = Mapping[str, Tensor]

_NUMBERS_AT_ONCE = 1 << 20  # numbers that are float32 at once
# Packages that store the same tensors: a weight in 8 bits, and its scale.
_SCALED_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")
METHODS = (*_SCALED_METHODS, "gptq", "awq", "mxfp4")
_ADVICE = (
    "use the checkpoint as it was before quantisation, a GGUF file, "
    "or one in FP8, compressed-tensors (8 or 4 bits), GPTQ, AWQ or MXFP4"
)
_COMPRESSED_FORMATS = {
    None, "dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized",
}  # fmt: skip
# Column i of eight is in the nibble of this place (AutoAWQ's order of packing, inverted).
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Stored beside a weight, and not needed: activations are not quantised here.
UNUSED = (
    ".input_scale",
    ".activation_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors of one weight are named: a stem, which they share, and these endings."""

    marker: str  # the ending that shows that the weight is quantised
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    weight: str  # the ending of the weight's name in the model
    dequantize: Callable[[Parts, torch.dtype], Tensor]


def layouts(quantization: Mapping[str, Any], model_type: str) -> tuple[Layout, ...]:
    """Return the layouts of a checkpoint with this `quantization_config`.

    Raises UnsupportedModelError, with what to do, for formats that cannot be read.
    """
    method = str(quantization.get("quant_method", "unknown"))
    try:
        if method not in METHODS:
            raise UnsupportedModelError(f"quantisation {method!r} cannot be read")
        if method == "mxfp4":
            return (Layout("_blocks", ("_scales",), (), "", _mxfp4),)
        if method in ("gptq", "awq"):
            return (_integer_layout(method, quantization),)
        return _scaled_layouts(method, quantization)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{model_type}: {error}: {_ADVICE}") from None


def _integer_layout(method: str, quantization: Mapping[str, Any]) -> Layout:
    """Return the layout of GPTQ or AWQ. Raises UnsupportedModelError."""
    bits = quantization.get("bits", 4)
    if method == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise UnsupportedModelError(f"AWQ of {bits} bits in version {version!r} cannot be read")
        return Layout(".qweight", (".qzeros", ".scales"), (), ".weight", _awq)
    if bits not in (2, 4, 8):
        raise UnsupportedModelError(f"GPTQ of {bits} bits cannot be read")
    # The first version stores zero points less one.
    offset = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    return Layout(
        ".qweight", (".qzeros", ".scales"), (".g_idx",), ".weight", partial(_gptq, bits=bits, offset=offset)
    )


def _scaled_layouts(method: str, quantization: Mapping[str, Any]) -> tuple[Layout, ...]:
    """Return the layouts of weights with scales, and of packed ones. Raises UnsupportedModelError."""
    block = quantization.get("weight_block_size")
    if method == "modelopt" and quantization.get("quant_algo") != "FP8":
        raise UnsupportedModelError(
            f"modelopt's {quantization.get('quant_algo')} cannot be read without a GPU"
        )
    if method == "fp8":
        scaled = partial(_scaled, block=block, names=("", "_scale_inv"))
        return (Layout("_scale_inv", ("",), (), "", scaled),)
    packed: tuple[Layout, ...] = ()
    if method == "compressed-tensors":
        groups = _check_compressed(quantization)
        block = next((group["block_structure"] for group in groups if group.get("block_structure")), None)
        if isinstance(block, str):
            block = [int(size) for size in block.split("x")]
        optional = (".weight_shape", ".weight_zero_point", ".weight_g_idx")
        packed = (Layout(".weight_packed", (".weight_scale",), optional, ".weight", _packed),)
    scaled = partial(_scaled, block=block, names=(".weight", ".weight_scale"))
    return (*packed, Layout(".weight_scale", (".weight",), (".weight_zero_point",), ".weight", scaled))


def _check_compressed(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how each group of layers quantises its weights. Raises UnsupportedModelError."""
    groups = list((quantization.get("config_groups") or {}).values())
    formats = {quantization.get("format"), *(group.get("format") for group in groups)}
    unknown = formats - _COMPRESSED_FORMATS
    if unknown:
        named = ", ".join(sorted(unknown))
        place = " without a GPU" if "nvfp4" in named else ""
        raise UnsupportedModelError(f"compressed-tensors of format {named} cannot be read{place}")
    if (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedModelError("compressed-tensors with a sparsity_config cannot be read")
    if (quantization.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModelError("compressed-tensors with a transform_config cannot be read")
    weights = [group["weights"] for group in groups if group.get("weights")]
    wrong = {item.get("num_bits", 8) for item in weights} - {4, 8}
    if wrong:
        raise UnsupportedModelError(f"compressed-tensors of {wrong.pop()} bits cannot be read")
    return weights


def _scaled(
    parts: Parts, dtype: torch.dtype, *, block: Sequence[int] | None, names: tuple[str, str]
) -> Tensor:
    """Return (weight − zero point) · scale [..., output, input].

    A scale is for the whole weight, for a row, or for a block of [rows, columns]; the last blocks may be cut
    off. A grid of scales that does not fit `block` divides the weight evenly.
    """
    weight, scale = parts[names[0]], _exponents(parts[names[1]])
    zero = parts.get(".weight_zero_point")
    scale = scale.reshape(*scale.shape, *(1,) * (weight.dim() - scale.dim()))
    size, grid = weight.shape[-2:], scale.shape[-2:]
    if block is None or [-(-length // each) for length, each in zip(size, block, strict=True)] != [*grid]:
        block = [-(-length // count) for length, count in zip(size, grid, strict=True)]
    output = torch.empty(weight.shape, dtype=dtype)
    step = max(_rows_at_once(weight) // block[0], 1) * block[0]
    for first in range(0, size[0], step):
        blocks = slice(first // block[0], -(-min(first + step, size[0]) // block[0]))
        some = weight[..., first : first + step, :].float()
        if zero is not None:
            some -= _spread(zero.reshape(scale.shape)[..., blocks, :].float(), block, some)
        some *= _spread(scale[..., blocks, :], block, some)
        output[..., first : first + step, :] = some
    return output


def _rows_at_once(weight: Tensor) -> int:
    return max(_NUMBERS_AT_ONCE * weight.shape[-2] // weight.numel(), 1)


def _exponents(scale: Tensor) -> Tensor:
    """Return scales as float32. As bytes, they are exponents of 2 (E8M0)."""
    return torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()


def _spread(values: Tensor, block: Sequence[int], like: Tensor) -> Tensor:
    """Repeat each value for the rows and columns of its block, up to the size of `like`."""
    values = values.repeat_interleave(block[0], -2)[..., : like.shape[-2], :]
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(block[1], -1)[..., : like.shape[-1]]


def _packed(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Return a weight of compressed-tensors' packed numbers, which are stored with half their range added."""
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    # Without its shape, the weight fills the packed numbers, of 4 bits.
    rows, columns = (
        parts[".weight_shape"].tolist() if ".weight_shape" in parts else (len(packed), 8 * packed.shape[1])
    )
    bits = 4 if packed.shape[1] == -(-columns // 8) else 8
    half = 2 ** (bits - 1)
    numbers = _unpacked(packed, bits, 1)[:, :columns]
    zero = parts.get(".weight_zero_point")
    zeros = torch.full_like(scale, half) if zero is None else _unpacked(zero, bits, 0)[:rows]
    return _of_groups(numbers, zeros, scale, parts.get(".weight_g_idx"), dtype)


def _gptq(parts: Parts, dtype: torch.dtype, *, bits: int, offset: int) -> Tensor:
    numbers = _unpacked(parts[".qweight"], bits, 0)  # [input, output]
    zeros = _unpacked(parts[".qzeros"], bits, 1).int() + offset  # [group, output]
    return _of_groups(numbers.T, zeros.T, parts[".scales"].T, parts.get(".g_idx"), dtype)


def _awq(parts: Parts, dtype: torch.dtype) -> Tensor:
    numbers, zeros = (
        _unpacked(parts[name], 4, 1).view(len(parts[name]), -1, 8)[..., _AWQ_ORDER].flatten(1)
        for name in (".qweight", ".qzeros")
    )
    return _of_groups(numbers.T, zeros.T, parts[".scales"].T, None, dtype)


def _of_groups(
    numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (number − zero) · scale [output, input].

    `zeros` and `scales` are [output, group]. `groups` has each input's group; None: they are of equal size.
    """
    rows, columns = numbers.shape
    num_groups = scales.shape[1]
    in_order = torch.arange(columns) // -(-columns // num_groups)
    index = in_order if groups is None or bool((groups < 0).any()) else groups.long()
    is_even = columns % num_groups == 0 and torch.equal(index, in_order)
    output = torch.empty(rows, columns, dtype=dtype)
    step = _rows_at_once(numbers)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        values = numbers[some].contiguous().float()
        zero, scale = zeros[some].float(), scales[some].float()
        if is_even:
            values = values.view(len(values), num_groups, -1)
            values.sub_(zero[..., None]).mul_(scale[..., None])
        else:
            values.sub_(zero[:, index]).mul_(scale[:, index])
        output[some] = values.view(-1, columns)
    return output


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the uint8 numbers of `bits` bits in int32 numbers, the lowest bits first along `dim`."""
    mask = 2**bits - 1
    parts = [((packed >> shift) & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _mxfp4(parts: Parts, dtype: torch.dtype) -> Tensor:
    """Return the weights of experts [expert, input, output] from blocks of 32 FP4 numbers with one exponent.

    OCP Microscaling Formats, version 1.0. `_blocks` is [expert, output, block, byte], the lower nibble first.
    """
    blocks, exponents = parts["_blocks"], _exponents(parts["_scales"])
    experts, outputs = blocks.shape[:2]
    values = torch.tensor(_FP4_VALUES)
    output = torch.empty(experts, blocks.shape[2] * blocks.shape[3] * 2, outputs, dtype=dtype)
    for expert in range(experts):
        step = _rows_at_once(output[expert].T)
        for first in range(0, outputs, step):
            some = slice(first, first + step)
            bytes_ = blocks[expert, some].int()
            numbers = torch.stack([values[bytes_ & 15], values[bytes_ >> 4]], dim=-1).flatten(2)
            output[expert, :, some] = (numbers * exponents[expert, some, :, None]).flatten(1).T
    return output

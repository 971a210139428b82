"""oneDNN's linear layer, with a weight that is reordered once instead of in every call."""

import ctypes
from typing import Any

import torch
from torch import Tensor

_OPERATORS = (
    "_is_mkldnn_bf16_supported",
    "_linear_pointwise",
    "_nbytes",
    "_reorder_linear_weight",
    "data_ptr",
)


def missing_operators() -> list[str]:
    """Return the operators that this torch lacks. A torch without oneDNN needs none of them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    return [f"torch.ops.mkldnn.{name}" for name in _OPERATORS if not hasattr(torch.ops.mkldnn, name)]


def supports(dtype: torch.dtype) -> bool:
    """Return whether weights of this type can be reordered."""
    if not torch.backends.mkldnn.is_available() or missing_operators():  # type: ignore[no-untyped-call]
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 or (dtype is torch.bfloat16 and has_bfloat16)


def multiplies(dtype: torch.dtype) -> bool:
    """Return False for bfloat16 on a CPU where oneDNN does not support it. Other types were not compared.

    There, beside float32, bfloat16 had a seventh of the rate for 512 rows of a linear layer, a thirtieth for
    a prompt's attention, and a third for one query's. One row of a linear layer, which reads half as many
    bytes, took half the time. (AVX2.)
    """
    return dtype is not torch.bfloat16 or supports(dtype)


def is_slow(tensor: Tensor) -> bool:
    """Return whether products of tensors like this one are faster in float32, on its device."""
    return tensor.device.type == "cpu" and not multiplies(tensor.dtype)


def reorder(weight: Tensor, num_rows: int) -> Tensor:
    """Return a weight [output, input] in oneDNN's layout for `num_rows` rows, as an opaque tensor."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return reordered


def linear(rows: Tensor, reordered: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of rows [..., input] and a reordered weight, plus the bias: [..., output]."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
    return output


def memory(reordered: Tensor) -> Tensor:
    """Return the bytes of a reordered weight: uint8, in the same memory."""
    num_bytes: int = torch.ops.mkldnn._nbytes(reordered)
    buffer: Any = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(reordered))
    buffer.owner = reordered  # the tensor keeps the buffer alive, and the buffer the memory
    return torch.frombuffer(buffer, dtype=torch.uint8)

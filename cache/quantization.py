"""Keys and values in 8 bits: rows of codes from -127 to 127, with a scale for each row.

A row is what one token has for one KV head. Its scale is its largest magnitude divided by 127, rounded to
bfloat16, so that no value is off by more than half a scale. The compiled kernel computes the same.
"""

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16  # the range of float32: float16 would be too short for small and for large rows
MAX_CODE = 127


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes [..., width] of rows [..., width], and their scales [..., 1].

    A row of zeros has the scale 0. A row that is not finite has a scale that is not.
    """
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / MAX_CODE).to(SCALE_DTYPE)
    codes = torch.where(scales > 0, rows / scales.float(), 0.0)
    return codes.round().to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [..., width] that `quantize` took, but for what it rounded, in `dtype`."""
    return (codes * scales.to(torch.promote_types(dtype, SCALE_DTYPE))).to(dtype)

"""Keys and values in 8 bits: rows of codes, with a scale for each row.

A row is what one token has for one KV head. Its scale is its largest magnitude divided by the largest code,
rounded to bfloat16. int8 has evenly spaced codes from -127 to 127, so that no value is off by more than half
a scale. fp8 (e4m3) has codes up to 448 with three bits after the leading one, so that no value of at least
1/64 of a scale is off by more than 1/16 of itself: small values beside a large one keep their digits.
The compiled kernel computes the same for int8.
"""

import torch
from torch import Tensor

from cache.pool_options import KVCacheDtype

SCALE_DTYPE = torch.bfloat16  # the range of float32: float16 would be too short for small and for large rows
_LARGEST_CODE = {KVCacheDtype.INT8: 127, KVCacheDtype.FP8: 448}
_FP8 = torch.float8_e4m3fn


def quantize(rows: Tensor, kind: KVCacheDtype = KVCacheDtype.INT8) -> tuple[Tensor, Tensor]:
    """Return the codes [..., width] of rows [..., width] in the bits of an int8, and their scales [..., 1].

    A row of zeros has the scale 0. A row that is not finite has a scale that is not.
    """
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE[kind]).to(SCALE_DTYPE)
    codes = torch.where(scales > 0, rows / scales.float(), 0.0)
    if kind is KVCacheDtype.FP8:
        return codes.to(_FP8).view(torch.int8), scales  # all operators that move data take int8
    return codes.round().to(torch.int8), scales


def dequantize(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, kind: KVCacheDtype = KVCacheDtype.INT8
) -> Tensor:
    """Return the rows [..., width] that `quantize` took, but for what it rounded, in `dtype`."""
    scales = scales.to(torch.promote_types(dtype, SCALE_DTYPE))
    if kind is KVCacheDtype.FP8:
        codes = codes.view(_FP8).to(scales.dtype)
    return (codes * scales).to(dtype)

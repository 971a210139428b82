"""Rows in 2 or 4 bits a value: a rotation that spreads outliers, and evenly spaced levels.

A row is what one token has for one KV head. Rotated rows are nearly normally distributed, so that few levels
serve all values of a row (as in arXiv 2604.08426, which uses vector codes instead). Products of two rows are
the same before and after the rotation: scores need no inverse. The compiled kernels compute the same.
"""

from functools import lru_cache

import torch
from torch import Tensor

from cache.layout import rotation_size

STEP_DTYPE = torch.bfloat16
# The distance between 4 levels that has the least squared error on a normal distribution, in deviations.
_STEP_OF_2_BITS = 0.9957


def rotate(rows: Tensor) -> Tensor:
    """Return rows [..., width] after a Hadamard rotation, in float32. It is its own inverse."""
    size = rotation_size(rows.shape[-1])
    parts = rows.float().reshape(rows.numel() // size, size)  # one plain product is the fastest
    return (parts @ _hadamard(size, rows.device)).view(rows.shape)


@lru_cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal, symmetric Hadamard matrix (Sylvester's construction)."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(size**0.5)


def quantize(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes [..., width] of rows [..., width], uint8 below 2^bits, and their steps [..., 1].

    A code c stands for (c + 1/2 - 2^(bits - 1)) steps. With 4 bits, no value is off by more than half a
    step, but for the rounding of the step itself. With 2 bits, large values are cut off. A row that is not
    finite has a step that is not.
    """
    rows = rows.float()
    half = 1 << (bits - 1)
    if bits == 2:
        steps = rows.square().mean(-1, keepdim=True).sqrt() * _STEP_OF_2_BITS
    else:
        steps = rows.abs().amax(-1, keepdim=True) / half
    steps = steps.to(STEP_DTYPE)
    scaled = torch.where(steps > 0, rows / steps.float(), 0.0)
    return (scaled.floor() + half).clamp(0, 2 * half - 1).to(torch.uint8), steps


def dequantize(codes: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the rows [..., width] that `quantize` took, but for what it rounded, in float32."""
    return (codes + (0.5 - (1 << (bits - 1)))) * steps.float()

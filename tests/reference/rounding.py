"""A row in 4 bits, number by number, as arXiv 2604.08426 stores it but for its vector codes."""

import math

import torch
from torch import Tensor


def in_4_bits(row: Tensor) -> Tensor:
    """Return what is left of a row [width] that is rotated, rounded to 16 levels, and rotated back."""
    rotated = _rotated(row.tolist())
    step = float(torch.tensor(max(map(abs, rotated)) / 8).bfloat16())
    levels = [step * (level + 0.5) for level in range(-8, 8)]
    return torch.tensor(_rotated([min(levels, key=lambda level: abs(level - number)) for number in rotated]))


def _rotated(row: list[float]) -> list[float]:
    """Rotate each part of a row whose length is the largest power of two that divides the row's."""
    size = 1
    while len(row) % (2 * size) == 0:
        size *= 2
    return [
        sum(row[first + j] * (-1) ** (i & j).bit_count() for j in range(size)) / math.sqrt(size)
        for first in range(0, len(row), size)
        for i in range(size)
    ]

"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in tensor operations.

A counter-based generator has no state: a random number is a function of its key and counter. A request's
numbers therefore depend on its seed and position only, and not on the batch, its slot or the device.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words for each counter and key. All are int64 tensors of 32-bit words."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # Products overflow at 2^64, which does not change their low bits. The mask removes the sign of the
        # shifted word.
        product0 = x0 * _MULTIPLIERS[0]
        product2 = x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((product2 >> 32) & _WORD) ^ x1 ^ k0,
            product2 & _WORD,
            ((product0 >> 32) & _WORD) ^ x3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _WEYL[0]) & _WORD
        k1 = (k1 + _WEYL[1]) & _WORD
    return x0, x1, x2, x3


def uniform(seed: Tensor, choice: Tensor, output_index: Tensor) -> Tensor:
    """Return one float64 in [0, 1) of 53 random bits for each draw.

    The arguments are int64. All 64 bits of `seed` count.
    """
    zero = torch.zeros_like(seed)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    first, second, _, _ = philox4x32((output_index & _WORD, choice & _WORD, zero, zero), key)
    # 32 bits of the first word and 21 of the second: a float64 holds 53.
    return ((first << 21) | (second >> 11)).double() * 2.0**-53

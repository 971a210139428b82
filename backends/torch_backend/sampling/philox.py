"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in tensor operations.

A counter-based generator has no state: a random number is a function of its key and counter. So a request's numbers depend on its own seed
and on how far it has come, never on its neighbours, its slot, or the device that computes them.
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
        # Products wrap around at 2^64, which leaves their bits right; the mask undoes the sign of the shifted word.
        low, high = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((high >> 32) & _WORD) ^ x1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ x3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return x0, x1, x2, x3


def uniform(seed: Tensor, choice: Tensor, output_index: Tensor) -> Tensor:
    """Return one number in [0, 1) for each draw: float64, of 53 random bits. The arguments are int64; of `seed` all 64 bits count."""
    zero = torch.zeros_like(seed)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    first, second, _, _ = philox4x32((output_index & _WORD, choice & _WORD, zero, zero), key)
    return ((first << 21) | (second >> 11)).double() * 2.0**-53

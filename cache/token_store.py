"""The tokens of one layer's slots that are older than their rings, in 4 bits a value.

Keys and values are stored rotated, as `cache.low_bits` does, with a step for each token and KV head. Nothing
is evicted: a token's entry is its place in the sequence, counted from the sinks. Keys are laid out for a scan
of all of them, values to be gathered one by one. This module knows no attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.low_bits import STEP_DTYPE, dequantize, quantize, rotate

BITS = 4
BLOCK = 16  # keys of a block: the kernel scores as many at once
STORED_TOGETHER = 8  # neighbouring numbers of a key, which share 4 bytes of its block


class TokenStore:
    """The stores of one layer's slots, of `num_tokens` tokens each.

    `planes` are the codes of keys [slot, kv_head, block, width / 8, 16, 4] and of values [slot, kv_head,
    entry, width / 2], then the steps of both, [slot, kv_head, entry]. The entry behind the last token is a
    spare one, which idle rows write to. 4 bytes of a key hold 8 of its numbers: the first four in their low
    halves, the others in their high halves. Byte i of a value holds its numbers i and i + width / 2.
    """

    def __init__(
        self,
        num_tokens: int,
        num_slots: int,
        num_kv_heads: int,
        widths: Sequence[int],
        device: torch.device | str,
    ) -> None:
        key_width, value_width = widths
        self.num_tokens = num_tokens
        num_blocks = num_tokens // BLOCK + 1  # with room for the spare entry
        of_slots = (num_slots, num_kv_heads)

        # Zeros: a weight of zero is multiplied by entries without a token, so they must be finite.
        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*of_slots, *sizes, dtype=dtype, device=device)

        self.planes = (
            zeros(num_blocks, key_width // STORED_TOGETHER, BLOCK, STORED_TOGETHER // 2, dtype=torch.uint8),
            zeros(num_blocks * BLOCK, value_width // 2, dtype=torch.uint8),
            zeros(num_blocks * BLOCK, dtype=STEP_DTYPE),
            zeros(num_blocks * BLOCK, dtype=STEP_DTYPE),
        )

    @property
    def spare_entry(self) -> int:
        """The entry that is written to by rows without a token to store, and never read."""
        return self.num_tokens

    def clear(self, slot: int) -> None:
        """Overwrite the steps of a slot with zeros. Codes are integers, and so always finite."""
        for steps in self.planes[2:]:
            steps[slot].zero_()

    def write(self, slots: Tensor, entries: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens: `slots` and `entries` [token], `key` and `value` [token, kv_head, width]."""
        keys, values, key_steps, value_steps = self.planes
        codes, steps = quantize(rotate(key), BITS)
        low, high = codes.view(
            *codes.shape[:2], codes.shape[2] // STORED_TOGETHER, 2, STORED_TOGETHER // 2
        ).unbind(-2)
        keys[slots, :, entries // BLOCK, :, entries % BLOCK] = low | high << BITS
        key_steps[slots, :, entries] = steps[..., 0]
        codes, steps = quantize(rotate(value), BITS)
        low, high = codes.chunk(2, dim=-1)
        values[slots, :, entries] = low | high << BITS
        value_steps[slots, :, entries] = steps[..., 0]

    def fill(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Store the first tokens of a slot: `keys` and `values` are [kv_head, token, width]."""
        entries = torch.arange(keys.shape[1], device=keys.device)
        self.write(torch.full_like(entries, slot), entries, keys.transpose(0, 1), values.transpose(0, 1))

    def keys(self, slots: slice) -> Tensor:
        """Return the rotated keys of some slots in float32, [slot, kv_head, entry, width]."""
        packed = self.planes[0][slots]
        codes = torch.stack([packed & 15, packed >> BITS], dim=-2)  # [..., block, width / 8, 16, 2, 4]
        rows = codes.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, : self.num_tokens]
        return dequantize(rows, self.planes[2][slots, :, : self.num_tokens, None], BITS)

    def values(self, slots: slice, entries: Tensor) -> Tensor:
        """Return the rotated values in entries [slot, kv_head, n] in float32, [slot, kv_head, n, width]."""
        packed = self.planes[1][slots]
        packed = packed.gather(2, entries[..., None].expand(-1, -1, -1, packed.shape[3]))
        codes = torch.cat([packed & 15, packed >> BITS], dim=-1)
        return dequantize(codes, self.planes[3][slots].gather(2, entries)[..., None], BITS)

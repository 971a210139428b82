"""The tokens of one layer's slots that are older than their rings, in 4 bits a value.

Keys and values are stored rotated, as `cache.low_bits` does, with steps for each token and KV head. A key is
stored less a centre: the mean of its head's keys in the prompt. These keys have much in common, and a smaller
row has smaller steps. (SageAttention, arXiv 2410.02367, takes the mean of all keys, which changes no softmax.
Here sinks and ring are exact, so the centre is added to what is read.)

Nothing is evicted: a token's entry is its place in the sequence, counted from the sinks. Keys are laid out
for a scan of all of them, values to be gathered one by one. So a GPU has the codes of values in the host's
memory, and all else in its own. Latents are keys, and parts of them are their values. This module knows no
attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.host_planes import host_plane
from cache.layout import STORE_BITS, part_size
from cache.low_bits import STEP_DTYPE, dequantize, quantize, rotate

BLOCK = 16  # keys of a block: the kernel scores as many at once
STORED_TOGETHER = 8  # neighbouring numbers of a key, which share 4 bytes of its block
# On random keys of which a tenth of the energy is in their mean, the mean of 4 makes the error 1.13 times as
# large as without a centre, that of 16 makes it 0.96 times as large.
_FEWEST_KEYS = 16


class TokenStore:
    """The stores of one layer's slots, of `num_tokens` tokens each.

    `widths` are those of keys and values, or that of latents. `planes` are the codes of keys [slot, kv_head,
    block, width / 8, 16, 4] and of values [slot, kv_head, entry, width / 2], then the steps of keys [slot,
    kv_head, block, part, 16] and of values [slot, kv_head, entry, part], and last the centres [slot, kv_head,
    width], rotated; latents have no planes of values.
    The entry behind the last token is a spare one, which idle rows write to. 4 bytes of a key hold 8 of its
    numbers: the first four in their low halves, the others in their high halves. Byte i of a part of a value
    holds the part's numbers i and i + size / 2.
    """

    def __init__(
        self,
        num_tokens: int,
        num_slots: int,
        num_kv_heads: int,
        widths: Sequence[int],
        device: torch.device | str,
    ) -> None:
        key_width, *value_widths = widths
        self.num_tokens = num_tokens
        num_blocks = num_tokens // BLOCK + 1  # with room for the spare entry
        of_slots = (num_slots, num_kv_heads)

        # Zeros: a weight of zero is multiplied by entries without a token, so they must be finite.
        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*of_slots, *sizes, dtype=dtype, device=device)

        self._part_sizes = [part_size(width) for width in widths]
        entries = num_blocks * BLOCK
        self.planes = (
            zeros(num_blocks, key_width // STORED_TOGETHER, BLOCK, STORED_TOGETHER // 2, dtype=torch.uint8),
            *(host_plane(*of_slots, entries, width // 2, device=device) for width in value_widths),
            zeros(num_blocks, key_width // self._part_sizes[0], BLOCK, dtype=STEP_DTYPE),
            *(
                zeros(entries, width // size, dtype=STEP_DTYPE)
                for width, size in zip(value_widths, self._part_sizes[1:], strict=True)
            ),
            zeros(key_width, dtype=torch.float32),
        )
        self._steps = self.planes[len(widths) : -1]
        self.centres = self.planes[-1]

    @property
    def spare_entry(self) -> int:
        """The entry that is written to by rows without a token to store, and never read."""
        return self.num_tokens

    @property
    def key_planes(self) -> tuple[Tensor, Tensor]:
        """The codes and steps of keys."""
        return self.planes[0], self._steps[0]

    @property
    def host_bytes(self) -> int:
        """Bytes that are in the host's memory, also where the device is a GPU."""
        return sum(plane.nbytes for plane in self.planes[1 : len(self._part_sizes)])

    def clear(self, slot: int) -> None:
        """Overwrite the steps and centres of a slot with zeros. Codes are integers, and so always finite."""
        for plane in (*self._steps, self.centres):
            plane[slot].zero_()

    def write(self, slots: Tensor, entries: Tensor, keys: Tensor, *values: Tensor) -> None:
        """Store tokens: `slots` and `entries` [token], `keys` and `values` [token, kv_head, width]."""
        self._write(slots, entries, self.centres[slots], keys, *values)

    def _write(self, slots: Tensor, entries: Tensor, centres: Tensor, keys: Tensor, *values: Tensor) -> None:
        """As `write`, with centres that are broadcast against the keys."""
        block, place = entries // BLOCK, entries % BLOCK
        codes, steps = self._quantize(0, rotate(keys) - centres)
        codes = torch.unflatten(codes.flatten(2), -1, (-1, 2, STORED_TOGETHER // 2))
        self.planes[0][slots, :, block, :, place] = codes[..., 0, :] | codes[..., 1, :] << STORE_BITS
        self._steps[0][slots, :, block, :, place] = steps
        for rows in values:
            codes, steps = self._quantize(1, rotate(rows))
            low, high = codes.chunk(2, dim=-1)
            self.planes[1][slots, :, entries] = (low | high << STORE_BITS).flatten(2)
            self._steps[1][slots, :, entries] = steps

    def _quantize(self, plane: int, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [token, kv_head, part, size] and steps [token, kv_head, part] of keys or values."""
        codes, steps = quantize(torch.unflatten(rotated, -1, (-1, self._part_sizes[plane])), STORE_BITS)
        return codes, steps[..., 0]

    def set_centres(self, slot: int, keys: Tensor) -> None:
        """Let the centres of a slot be the means of a prompt's `keys` [kv_head, token, width].

        The slot must have stored nothing yet. A few keys say too little: their mean is no centre.
        """
        if keys.shape[1] >= _FEWEST_KEYS:
            self.centres[slot] = rotate(keys.float().mean(1))

    def fill(self, slot: int, keys: Tensor, *values: Tensor) -> None:
        """Store the first tokens of a slot: `keys` and `values` are [kv_head, token, width]."""
        entries = torch.arange(keys.shape[1], device=keys.device)
        rows = [each.transpose(0, 1) for each in (keys, *values)]
        self._write(torch.full_like(entries, slot), entries, self.centres[slot], *rows)

    def keys(self, slots: slice) -> Tensor:
        """Return the rotated keys of some slots in float32, [slot, kv_head, entry, width]."""
        packed = self.planes[0][slots].transpose(3, 4).flatten(2, 3)[:, :, : self.num_tokens]
        steps = self._steps[0][slots].transpose(3, 4).flatten(2, 3)[:, :, : self.num_tokens]
        return self._dequantized_keys(packed, steps) + self.centres[slots][:, :, None]

    def values(self, slots: slice, entries: Tensor) -> Tensor:
        """Return the rotated values in entries [slot, kv_head, n] in float32, [slot, kv_head, n, width].

        Of latents, these are the whole rows.
        """
        if len(self._part_sizes) == 1:
            packed, steps = self.planes[0][slots], self._steps[0][slots]
            row = torch.arange(packed.shape[0], device=entries.device)[:, None, None]
            head = torch.arange(packed.shape[1], device=entries.device)[:, None]
            index = row, head, entries // BLOCK, slice(None), entries % BLOCK
            return self._dequantized_keys(packed[index], steps[index]) + self.centres[slots][:, :, None]
        rows, steps = (
            plane[slots].gather(2, entries[..., None].expand(-1, -1, -1, plane.shape[3]))
            for plane in (self.planes[1], self._steps[1])
        )
        packed = torch.unflatten(rows, -1, (-1, self._part_sizes[1] // 2))  # [..., part, size / 2]
        codes = torch.cat([packed & 15, packed >> STORE_BITS], dim=-1)
        return dequantize(codes, steps[..., None], STORE_BITS).flatten(-2)

    def _dequantized_keys(self, packed: Tensor, steps: Tensor) -> Tensor:
        """Return keys [..., width] less centres, of `packed` [..., width / 8, 4] and `steps` [..., part]."""
        codes = torch.stack([packed & 15, packed >> STORE_BITS], dim=-2).flatten(-3)
        parts = torch.unflatten(codes, -1, (-1, self._part_sizes[0]))
        return dequantize(parts, steps[..., None], STORE_BITS).flatten(-2)

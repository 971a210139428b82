"""The slots of one layer as tensors, and the slot arithmetic of `cache.layout` over tensors.

Here is known where a token's keys and values lie, not what they mean: attention, rotary positions and the choice of the tokens to keep are
other modules' business. The functions and `SlotCache.write` are made for a compiler: static shapes, no branch on a tensor's value, the
layout a constant of the graph. `SlotCache.pack` and `SlotCache.copy` run once a prompt and take plain integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import SlotLayout, SlotPlacement


def decode_entries(layout: SlotLayout, index: Tensor, ring_size: Tensor | int) -> Tensor:
    """Return the entries that the tokens at `index` are written to: sinks, and everything from the window start on.

    As `SlotPlacement.entry`; `ring_size` is broadcast against `index`.
    """
    sink = layout.num_sink
    return torch.where(index < sink, index, sink + (index - sink) % ring_size)


def direct_entries(layout: SlotLayout, index: Tensor, window_start: Tensor, ring_size: Tensor) -> Tensor:
    """Return the entries of a prompt's tokens when the whole prompt fits, its candidates in the kept entries at the slot's end.

    As `SlotPlacement.direct_entry`; `window_start` and `ring_size` are broadcast against `index`.
    """
    sink = layout.num_sink
    kept = _kept_start(layout, window_start) + index - sink
    is_candidate = (index >= sink) & (index < window_start)
    return torch.where(is_candidate, kept, decode_entries(layout, index, ring_size))


def direct_index(
    layout: SlotLayout,
    num_tokens: Tensor,
    window_start: Tensor,
    ring_size: Tensor,
    num_entries: int | None = None,
) -> Tensor:
    """Return which token each entry holds, −1 for none, after the first `num_tokens` of a sequence whose prompt fits its slot.

    The tensors are [row], the result is [row, entry], of the first `num_entries` or of all. `ring_size` is at least 1 in every row, an idle
    one too.
    """
    num_tokens, window_start, ring_size = num_tokens[:, None], window_start[:, None], ring_size[:, None]
    entry = torch.arange(layout.capacity if num_entries is None else num_entries, device=num_tokens.device)
    sink, kept_start, last = layout.num_sink, _kept_start(layout, window_start), num_tokens - 1
    ring = last - (last - entry) % ring_size
    in_ring = (entry >= sink) & (entry < sink + ring_size) & (ring >= window_start)
    index = torch.where(entry < sink, entry, torch.where(in_ring, ring, num_tokens))
    index = torch.where(entry >= kept_start, sink + entry - kept_start, index)
    return torch.where(index < num_tokens, index, -1)


def live_mask(
    layout: SlotLayout,
    num_tokens: Tensor,
    window_start: Tensor,
    ring_size: Tensor,
    num_entries: int | None = None,
) -> Tensor:
    """Return which entries hold a token after `num_tokens` were written, the whole prompt among them. Bool [row, entry].

    A row of `num_tokens` 0 and a `window_start` of at most `layout.num_sink` has none. Kept entries are live whichever candidates they
    hold, so the answer is that of a sequence whose prompt fits.
    """
    return direct_index(layout, num_tokens, window_start, ring_size, num_entries) >= 0


def _kept_start(layout: SlotLayout, window_start: Tensor) -> Tensor:
    return layout.capacity - (window_start - layout.num_sink).clamp(max=layout.num_kept)


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One of the tensors that a layer holds for each token: keys, values, or latents with their rotary keys."""

    name: str
    width: int
    dtype: torch.dtype


class SlotCache:
    """The slots of one layer.

    `planes` are [slot, kv_head, capacity + 1, width], in the order of their specs. The last entry is a spare one that idle rows and padding
    write to: readers take `[:, :, :capacity]`. `kept_index` [slot, kv_head, num_kept] says which tokens `pack` kept, ascending in its used
    part; a prompt written straight into its slot keeps all its candidates, in order, and leaves `kept_index` alone.
    """

    def __init__(
        self,
        layout: SlotLayout,
        num_slots: int,
        num_kv_heads: int,
        planes: Sequence[PlaneSpec],
        device: torch.device | str,
    ) -> None:
        self.layout = layout
        # Zeros, because what an attention weight of zero meets in an entry that is not live must at least be finite.
        self.planes = tuple(
            torch.zeros(
                num_slots, num_kv_heads, layout.capacity + 1, plane.width, dtype=plane.dtype, device=device
            )
            for plane in planes
        )
        self.kept_index = torch.zeros(
            num_slots, num_kv_heads, layout.num_kept, dtype=torch.int64, device=device
        )

    @property
    def spare_entry(self) -> int:
        """The entry that nobody reads."""
        return self.layout.capacity

    @property
    def num_slots(self) -> int:
        return self.kept_index.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.planes, self.kept_index))

    def write(self, slots: Tensor, entries: Tensor, values: Sequence[Tensor]) -> None:
        """Write tokens: `slots` is [row], `entries` [row, token], and each plane's values [row, kv_head, token, width]."""
        for plane, value in zip(self.planes, values, strict=True):
            plane[slots[:, None], :, entries] = value.transpose(1, 2)

    def pack(
        self,
        slot: int,
        sources: Sequence[Tensor],
        placement: SlotPlacement,
        num_prompt_tokens: int,
        kept: Tensor | None = None,
        num_given_up: int = 0,
    ) -> None:
        """Fill a slot from a prompt that was read elsewhere: its sinks, its window in ring order, and the tokens to keep.

        Each plane's source is [kv_head, length, width], in order of the sequence. `kept` is [kv_head, token]: `placement.num_kept_used`
        tokens, ascending, and `placement.num_lent` for the ring entries lent, in the order in which decode takes these back. None keeps all
        candidates, and there must be no more of them than kept entries. A source that gave up `num_given_up` candidates has the window so
        much earlier, and `kept` says where in it the others lie.
        """
        start, sink, num_used = placement.window_start, self.layout.num_sink, placement.num_kept_used
        device = self.kept_index.device
        if kept is None:
            assert num_used in (start - sink, 0), (
                f"{start - sink} candidates for {num_used} kept entries, and nobody chose"
            )
            kept = torch.arange(sink, sink + num_used, device=device).expand(self.kept_index.shape[1], -1)
        window = torch.arange(placement.candidates_end, max(placement.candidates_end, num_prompt_tokens))
        index = torch.cat([torch.arange(min(num_prompt_tokens, sink)), window]).to(device)
        lent = decode_entries(
            self.layout, torch.arange(start, placement.candidates_end, device=device), placement.ring_size
        )
        chosen = torch.cat([torch.arange(placement.kept_start, self.layout.capacity, device=device), lent])
        entries = decode_entries(self.layout, index, placement.ring_size)
        held = torch.where(index < sink, index, index - num_given_up)
        for plane, source in zip(self.planes, sources, strict=True):
            plane[slot][:, entries] = source[:, held]
            plane[slot][:, chosen] = source.gather(1, kept[..., None].expand(-1, -1, source.shape[2]))
        self.kept_index[slot, :, :num_used] = kept[:, :num_used]

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give the slots `targets` what `source` holds."""
        for tensor in (*self.planes, self.kept_index):
            for target in targets:
                tensor[target] = tensor[source]

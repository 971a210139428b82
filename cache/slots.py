"""The slots of one layer as tensors, and the slot arithmetic of `cache.layout` over tensors.

This module knows where a token's keys and values are stored, not what they mean: it knows no attention, no
rotary positions and no scores. The functions and `SlotCache.write` are made for a compiler: shapes are
static, no branch depends on a tensor's value, and the layout is a constant of the graph. `SlotCache.pack` and
`SlotCache.copy` run once a prompt and take plain integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.layout import SlotLayout, SlotPlacement, StoreLayout
from cache.pool_options import KVCacheDtype
from cache.quantization import SCALE_DTYPE, dequantize, quantize
from cache.token_store import TokenStore


def decode_entries(layout: SlotLayout, index: Tensor, ring_size: Tensor | int) -> Tensor:
    """Return the entries that tokens are written to: sinks', and those from the window start on.

    As `SlotPlacement.entry`; `ring_size` is broadcast against `index`.
    """
    sink = layout.num_sink
    return torch.where(index < sink, index, sink + (index - sink) % ring_size)


def direct_entries(layout: SlotLayout, index: Tensor, window_start: Tensor, ring_size: Tensor) -> Tensor:
    """Return the entries of a prompt's tokens when the whole prompt fits: candidates go to the kept entries.

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
    """Return the index of the token in each entry, −1 for none, for prompts that fit their slots.

    The tensors are [row]. `num_tokens` tokens have been written, of the prompt or after it. The result is
    [row, entry], of the first `num_entries` entries or of all. `ring_size` is at least 1 in idle rows too.
    """
    num_tokens = num_tokens[:, None]
    window_start = window_start[:, None]
    ring_size = ring_size[:, None]
    entry = torch.arange(layout.capacity if num_entries is None else num_entries, device=num_tokens.device)
    sink = layout.num_sink
    kept_start = _kept_start(layout, window_start)
    # As `SlotPlacement.ring_index`, where `entry` is num_sink + offset.
    last = num_tokens - 1
    ring = last - (last - entry) % ring_size
    in_ring = (entry >= sink) & (entry < sink + ring_size) & (ring >= window_start)
    # Entries that hold nothing get an index that is out of range, which becomes −1 at the end.
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
    """Return which entries hold a token after `num_tokens` tokens: bool [row, entry].

    The whole prompt is among these tokens. A row of `num_tokens` 0 and a `window_start` of at most
    `layout.num_sink` has none. Kept entries are live whichever candidates they hold, so that the result is
    that of a sequence whose prompt fits.
    """
    return direct_index(layout, num_tokens, window_start, ring_size, num_entries) >= 0


def _kept_start(layout: SlotLayout, window_start: Tensor) -> Tensor:
    return layout.capacity - (window_start - layout.num_sink).clamp(max=layout.num_kept)


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One tensor of a layer: keys, values, or latents with their rotary keys; `width` numbers a token."""

    name: str
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size that a layer carries from token to token, as one sequence has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SlotCache:
    """The slots of one layer.

    `planes` are [slot, kv_head, capacity + 1, width], in the order of their specs. The last entry is a spare
    one, which idle rows and padding write to: readers take `[:, :, :capacity]`. In 8 bits, they hold the
    codes of `cache.quantization`, and as many planes of width 1 with the scales follow. `kept_index` [slot,
    kv_head, num_kept] has the indices of the tokens that `pack` kept, ascending in its used part. A prompt
    written straight into its slot keeps all its candidates, in order, and leaves `kept_index` alone. `store`
    holds the tokens that have left the ring, if the policy has one. `states` are [slot, …], in the order of
    their specs, and zeros before a sequence's first token. A layer may have planes, states, both or neither.
    """

    def __init__(
        self,
        layout: SlotLayout,
        num_slots: int,
        num_kv_heads: int,
        planes: Sequence[PlaneSpec],
        device: torch.device | str,
        *,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
        store: StoreLayout | None = None,
        states: Sequence[StateSpec] = (),
    ) -> None:
        self.layout = layout
        widths = [plane.width for plane in planes]
        self.store = (
            TokenStore(store.num_tokens, num_slots, num_kv_heads, widths, device)
            if store is not None and planes
            else None
        )
        self.kv_cache_dtype = kv_cache_dtype
        self._dtypes = tuple(plane.dtype for plane in planes)
        stored = [(plane.width, plane.dtype) for plane in planes]
        if kv_cache_dtype.is_rounded:
            stored = [(plane.width, torch.int8) for plane in planes] + [(1, SCALE_DTYPE)] * len(planes)
        # Zeros: attention multiplies entries that are not live by a weight of zero, so they must be finite.
        self.planes = tuple(
            torch.zeros(num_slots, num_kv_heads, layout.capacity + 1, width, dtype=dtype, device=device)
            for width, dtype in stored
        )
        self.kept_index = torch.zeros(
            num_slots, num_kv_heads, layout.num_kept, dtype=torch.int64, device=device
        )
        self.states = tuple(
            torch.zeros(num_slots, *state.shape, dtype=state.dtype, device=device) for state in states
        )

    @property
    def spare_entry(self) -> int:
        """The entry that is written to by rows without a token, and never read."""
        return self.layout.capacity

    @property
    def num_slots(self) -> int:
        return self.kept_index.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.contents, self.kept_index))

    @property
    def host_bytes(self) -> int:
        """Those of `num_bytes` that are in the host's memory, also where the device is a GPU."""
        return 0 if self.store is None else self.store.host_bytes

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """What the slots hold: the planes, those of the store, and the states."""
        stored = () if self.store is None else self.store.planes
        return (*self.planes, *stored, *self.states)

    def clear(self, slot: int, start: int = 0, end: int | None = None) -> None:
        """Overwrite a slot with zeros: NaN or infinity would get through an attention weight of zero.

        Of its planes, only the entries from `start` to `end`: a caller may know that the others are zeros or
        will be written to before they are read.
        """
        for plane in self.planes:
            plane[slot, :, start:end].zero_()
        if self.store is not None:
            self.store.clear(slot)
        for state in self.states:
            state[slot].zero_()

    def write(self, slots: Tensor, entries: Tensor, values: Sequence[Tensor]) -> None:
        """Write tokens: `slots` [row], `entries` [row, token], `values` [row, kv_head, token, width]."""
        for plane, value in zip(self.planes, self._stored(values), strict=True):
            plane[slots[:, None], :, entries] = value.transpose(1, 2)

    def read(self, slots: Tensor | slice, num_entries: int) -> list[Tensor]:
        """Return the first entries of some slots in the dtypes of the specs: [row, kv_head, entry, width]."""
        parts = [plane[:, :, :num_entries][slots] for plane in self.planes]
        if not self.kv_cache_dtype.is_rounded:
            return parts
        num_planes = len(self._dtypes)
        return [
            dequantize(codes, scales, dtype, self.kv_cache_dtype)
            for codes, scales, dtype in zip(parts[:num_planes], parts[num_planes:], self._dtypes, strict=True)
        ]

    def _stored(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the planes hold of values: themselves, or their codes and then their scales."""
        if not self.kv_cache_dtype.is_rounded:
            return values
        codes, scales = zip(*(quantize(each, self.kv_cache_dtype) for each in values), strict=True)
        return *codes, *scales

    def pack(
        self,
        slot: int,
        sources: Sequence[Tensor],
        placement: SlotPlacement,
        num_prompt_tokens: int,
        kept: Tensor | None = None,
        num_evicted: int = 0,
    ) -> None:
        """Fill a slot from a prompt that was read in a scratch: its sinks, its window, and the tokens to
        keep.

        Each plane's source is [kv_head, length, width], in the order of the sequence. `kept` is [kv_head,
        token]: the source's entries of `placement.num_kept_used` tokens, ascending, then of
        `placement.num_lent` tokens for the ring entries lent, in the order in which decode overwrites them.
        None keeps all candidates, of which there must be no more than kept entries. A source from which
        `num_evicted` candidates were evicted has the window that many entries earlier.
        """
        sink = self.layout.num_sink
        start = placement.window_start
        num_used = placement.num_kept_used
        device = self.kept_index.device
        if kept is None:
            assert num_used in (start - sink, 0), (
                f"{start - sink} candidates for {num_used} kept entries, and no choice between them"
            )
            kept = torch.arange(sink, sink + num_used, device=device).expand(self.kept_index.shape[1], -1)
        # Tokens that every head holds: the sinks and the window, less its first tokens where their entries
        # are lent.
        window = torch.arange(placement.candidates_end, max(placement.candidates_end, num_prompt_tokens))
        index = torch.cat([torch.arange(min(num_prompt_tokens, sink)), window]).to(device)
        entries = decode_entries(self.layout, index, placement.ring_size)
        source_entries = torch.where(index < sink, index, index - num_evicted)
        # Tokens that each head has chosen for itself: the kept entries, and the ring entries lent.
        lent_index = torch.arange(start, placement.candidates_end, device=device)
        lent_entries = decode_entries(self.layout, lent_index, placement.ring_size)
        kept_entries = torch.arange(placement.kept_start, self.layout.capacity, device=device)
        chosen_entries = torch.cat([kept_entries, lent_entries])
        shared = self._stored([source.index_select(1, source_entries) for source in sources])
        chosen = self._stored(
            [source.gather(1, kept[..., None].expand(-1, -1, source.shape[2])) for source in sources]
        )
        for plane, shared_part, chosen_part in zip(self.planes, shared, chosen, strict=True):
            plane[slot].index_copy_(1, entries, shared_part)
            plane[slot].index_copy_(1, chosen_entries, chosen_part)
        self.kept_index[slot, :, :num_used] = kept[:, :num_used]
        if self.store is not None:
            self.store.set_centres(slot, sources[0][:, sink:num_prompt_tokens])
            self.store.fill(slot, *(source[:, sink:start] for source in sources))

    def set_centres(self, slot: int, num_prompt_tokens: int) -> None:
        """Set the centres of the store for a prompt that was written straight into its slot."""
        if self.store is not None:
            self.store.set_centres(slot, self.planes[0][slot, :, self.layout.num_sink : num_prompt_tokens])

    def demote(self, slots: Tensor, entries: Tensor, store_entries: Tensor) -> None:
        """Store the tokens in some ring entries, which are overwritten next. All arguments are [row]."""
        assert self.store is not None, "only a policy with a store demotes tokens"
        self.store.write(slots, store_entries, *(plane[slots, :, entries] for plane in self.planes))

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Copy the contents of slot `source` to the slots `targets`."""
        for tensor in (*self.contents, self.kept_index):
            for target in targets:
                tensor[target] = tensor[source]

"""One pool of slots on the device: the cache of its sequences, and the sampler of their tokens."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from backends.interface import DecodeBatch, SlotPoolSpec
from backends.torch_backend.forward.cache import CacheLayer, ModelCache
from backends.torch_backend.forward.step import LayerKind
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.sampling.sampler import Sampler
from cache.layout import SlotLayout
from cache.scratch import ScratchLayout
from cache.slots import SlotCache

ALL_ENTRIES = sys.maxsize


@dataclass(frozen=True, slots=True)
class TorchPool:
    """Slots of one policy. Pools share only the scratches, each of which holds one prompt at a time.

    `written` has, for each slot, the number of its first entries that may hold something. The others, but
    for the spare one, are zeros. So a new prompt need not clear all of its slot: for a large slot, that takes
    as long as reading a short prompt.
    """

    spec: SlotPoolSpec
    kinds: tuple[LayerKind, ...]
    cache: ModelCache
    sampler: Sampler
    written: list[int]

    @property
    def device(self) -> torch.device:
        return self.cache.layers[0].slots.kept_index.device

    @classmethod
    def build(
        cls,
        spec: SlotPoolSpec,
        layer_kinds: Sequence[LayerKind],
        layers: Sequence[LayerSpec],
        scratches: Sequence[SlotCache],
        vocab_size: int,
        kernels: Kernels,
    ) -> "TorchPool":
        """Allocate the slots of a model. The sequences have an item for each layer that stores."""
        device = scratches[0].kept_index.device
        kinds = tuple(dict.fromkeys(layer_kinds))
        cache_layers = [
            CacheLayer(layer, kinds.index(kind), kind, spec.num_slots, scratch, device, spec.kv_cache_dtype)
            for layer, kind, scratch in zip(layers, layer_kinds, scratches, strict=True)
        ]
        # The leader's scores count in all full-attention layers after it. Those before it are independent.
        if spec.policy.leading_layer is not None:
            full_attention = [
                layer for layer in cache_layers if layer.holds_entries and layer.kind.sliding_window is None
            ]
            leader, *followers = full_attention[spec.policy.leading_layer :]
            for layer in followers:
                layer.leader = leader
        sources = {reader: source for source, layer in enumerate(layers) for reader in layer.readers}
        slot_bytes = sum(layer.slots.num_bytes for layer in cache_layers) // max(spec.num_slots, 1)
        return cls(
            replace(spec, slot_bytes=slot_bytes),
            kinds,
            ModelCache(cache_layers, kernels, sources),
            Sampler(spec.num_slots, vocab_size, device, kernels),
            [0] * spec.num_slots,
        )

    def will_write(self, slot: int, num_entries: int) -> None:
        """Note that a slot's first `num_entries` entries, of those that it has, may be written to."""
        self.written[slot] = max(self.written[slot], num_entries)

    def will_decode(self, batch: DecodeBatch) -> None:
        """Note which entries the steps of a batch may write to."""
        for row in batch.rows:
            self.will_write(row.slot, row.index + batch.num_steps + len(row.draft_token_ids))


def allocate_scratches(
    layout: ScratchLayout, num_scratch: int, layers: Sequence[LayerSpec], device: torch.device
) -> list[SlotCache]:
    """Return each layer's scratches: slots that are all ring, so that entries keep the sequence's order."""
    entries = SlotLayout(0, layout.num_entries, 0)
    return [
        SlotCache(entries, num_scratch, layer.num_kv_heads, layer.planes, device, states=layer.states)
        for layer in layers
    ]

"""Uncompressed blocks of prompts in host memory, copied out of slots and scratches and back into them.

Which number holds which tokens is known to the scheduler. Keys and values of a token depend on no token
behind it, so a restored block is what reading the same tokens in the same chunks would have written.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backends.interface import PrefillRow, PrefixSpec, SlotStore, StoredBlock
from backends.torch_backend.forward.step import LayerKind
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.pool import TorchPool
from cache.slots import SlotCache, direct_entries

BLOCK_TOKENS = 128  # divides the chunks of prefill; a prompt of 8,192 tokens has 64 blocks


def prefix_spec(num_bytes: int, layers: Sequence[LayerSpec]) -> PrefixSpec | None:
    """Return the store of `num_bytes` bytes at most; None if they hold no block."""
    block_bytes = sum(
        layer.num_kv_heads * BLOCK_TOKENS * plane.width * plane.dtype.itemsize
        for layer in layers
        for plane in layer.planes
    )
    num_blocks = num_bytes // block_bytes
    return PrefixSpec(num_blocks, BLOCK_TOKENS, block_bytes) if num_blocks else None


class PrefixStore:
    """The blocks of all pools: for each plane of each layer, one tensor [number, kv_head, token, width]."""

    def __init__(self, spec: PrefixSpec, layers: Sequence[LayerSpec], device: torch.device) -> None:
        self._device = device
        self._block_tokens = spec.block_tokens
        self.block_bytes = spec.block_bytes
        self._blocks = [
            [
                torch.empty(
                    spec.num_blocks,
                    layer.num_kv_heads,
                    spec.block_tokens,
                    plane.width,
                    dtype=plane.dtype,
                    pin_memory=device.type == "cuda",  # so that copies do not wait for the device
                )
                for plane in layer.planes
            ]
            for layer in layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for planes in self._blocks for plane in planes)

    def dump(self, number: int) -> bytes:
        """Return a block's bytes. No step may be under way."""
        return b"".join(part.numpy().tobytes() for part in self._parts(number))

    def fill(self, number: int, data: memoryview) -> None:
        """Overwrite a block by the bytes that `dump` returned. No step may be under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a step that failed may have left copies under way
        start = 0
        for part in self._parts(number):
            part.copy_(torch.frombuffer(data, dtype=torch.uint8, count=len(part), offset=start))
            start += len(part)

    def _parts(self, number: int) -> Iterator[Tensor]:
        """Yield a block's planes as bytes."""
        for planes in self._blocks:
            for plane in planes:
                yield plane[number].reshape(-1).view(torch.uint8)

    def restore(self, pool: TorchPool, row: PrefillRow) -> None:
        """Copy a row's restored blocks to where its prompt is read, which is empty."""
        blocks = [StoredBlock(number, index) for index, number in enumerate(row.restored_blocks)]
        if row.scratch is None:
            self._restore_slot(pool, row, blocks)
        else:
            self._restore_scratch(pool, row.scratch, blocks)

    def store(self, pool: TorchPool, row: PrefillRow) -> None:
        """Copy the blocks that a row stores from where its prompt was read."""
        if row.scratch is None:
            self._store_slot(pool, row.slots[0], row.num_prompt_tokens, row.stored_blocks)
        else:
            self._store_scratch(pool, row.scratch, row.stored_blocks)

    def store_slot(self, pool: TorchPool, store: SlotStore) -> None:
        """Copy blocks of a sequence that has ended from its slot."""
        self._store_slot(pool, store.slot, store.num_prompt_tokens, store.blocks)

    def _restore_scratch(self, pool: TorchPool, scratch: int, blocks: Sequence[StoredBlock]) -> None:
        for layer, planes in zip(pool.cache.layers, self._blocks, strict=True):
            for plane, stored in zip(layer.scratch.planes, planes, strict=True):
                for block in blocks:
                    plane[scratch, :, self._span(block)].copy_(stored[block.number], non_blocking=True)

    def _store_scratch(self, pool: TorchPool, scratch: int, blocks: Sequence[StoredBlock]) -> None:
        for layer, planes in zip(pool.cache.layers, self._blocks, strict=True):
            for plane, stored in zip(layer.scratch.planes, planes, strict=True):
                for block in blocks:
                    stored[block.number].copy_(plane[scratch, :, self._span(block)], non_blocking=True)

    def _restore_slot(self, pool: TorchPool, row: PrefillRow, blocks: Sequence[StoredBlock]) -> None:
        for layer, planes, entries in self._slot_planes(pool, row.num_prompt_tokens, blocks):
            for plane, stored in zip(layer.planes, planes, strict=True):
                for block, block_entries in zip(blocks, entries, strict=True):
                    values = stored[block.number].to(plane.device, non_blocking=True)
                    plane[row.slots[0]][:, block_entries] = values

    def _store_slot(
        self, pool: TorchPool, slot: int, num_prompt_tokens: int, blocks: Sequence[StoredBlock]
    ) -> None:
        for layer, planes, entries in self._slot_planes(pool, num_prompt_tokens, blocks):
            for plane, stored in zip(layer.planes, planes, strict=True):
                for block, block_entries in zip(blocks, entries, strict=True):
                    stored[block.number].copy_(plane[slot][:, block_entries], non_blocking=True)

    def _slot_planes(
        self, pool: TorchPool, num_prompt_tokens: int, blocks: Sequence[StoredBlock]
    ) -> Iterator[tuple[SlotCache, list[Tensor], list[Tensor]]]:
        """Yield each layer's slots, its stored planes, and the entries of each block's tokens in a slot."""
        entries = {
            kind: [self._entries(kind, num_prompt_tokens, block, pool.device) for block in blocks]
            for kind in pool.kinds
        }
        for layer, planes in zip(pool.cache.layers, self._blocks, strict=True):
            yield layer.slots, planes, entries[layer.kind]

    def _entries(
        self, kind: LayerKind, num_prompt_tokens: int, block: StoredBlock, device: torch.device
    ) -> Tensor:
        """Return the entries of a block's tokens in a slot that holds all of its sequence."""
        placement = kind.policy.place(num_prompt_tokens)
        span = self._span(block)
        index = torch.arange(span.start, span.stop, device=device)
        window_start = torch.tensor(placement.window_start, device=device)
        ring_size = torch.tensor(placement.ring_size, device=device)
        return direct_entries(kind.policy.layout, index, window_start, ring_size)

    def _span(self, block: StoredBlock) -> slice:
        """Return the indices of a block's tokens in its sequence, and their entries in a scratch."""
        return slice(block.index * self._block_tokens, (block.index + 1) * self._block_tokens)

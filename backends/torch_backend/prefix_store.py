"""Uncompressed blocks of prompts in host memory, copied out of slots and scratches and back into them.

Which number holds which tokens is known to the scheduler. Keys and values of a token depend on no token
behind it, so a restored block is what reading the same tokens in the same chunks would have written. Only a
store in 8 bits rounds them, as `cache.quantization` does.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backends.interface import PrefillRow, PrefixSpec, SlotStore, StoredBlock
from backends.torch_backend.forward.step import LayerKind
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.pool import TorchPool
from cache.pool_options import KVCacheDtype
from cache.quantization import SCALE_DTYPE, dequantize, quantize
from cache.slots import PlaneSpec, direct_entries

MOST_BLOCKS = 64  # that are copied at once
# The tokens behind the last whole block are read again. With blocks of 128, that was a chunk of its own.
BLOCK_TOKENS = 32


def prefix_spec(
    num_bytes: int, layers: Sequence[LayerSpec], kind: KVCacheDtype = KVCacheDtype.AUTO
) -> PrefixSpec | None:
    """Return the store of `num_bytes` bytes at most; None if they hold no block."""
    block_bytes = sum(
        layer.num_kv_heads * BLOCK_TOKENS * width * dtype.itemsize
        for layer in layers
        for plane in layer.planes
        for width, dtype in _parts(plane, kind)
    )
    num_blocks = num_bytes // block_bytes
    return PrefixSpec(num_blocks, BLOCK_TOKENS, block_bytes) if num_blocks else None


def _parts(plane: PlaneSpec, kind: KVCacheDtype) -> tuple[tuple[int, torch.dtype], ...]:
    """Return the widths and types in which a plane's rows are stored: themselves, or codes and a scale."""
    if not kind.is_rounded:
        return ((plane.width, plane.dtype),)
    return ((plane.width, torch.int8), (1, SCALE_DTYPE))


class PrefixStore:
    """The blocks of all pools: for each plane of each layer, tensors [number, kv_head, token, width].

    There is one with its rows, or in 8 bits one with their codes and one of width 1 with their scales.
    """

    def __init__(
        self,
        spec: PrefixSpec,
        layers: Sequence[LayerSpec],
        device: torch.device,
        kind: KVCacheDtype = KVCacheDtype.AUTO,
    ) -> None:
        self._device = device
        self._kind = kind
        self._block_tokens = spec.block_tokens
        self.block_bytes = spec.block_bytes
        self._blocks = [
            [
                tuple(
                    torch.empty(
                        spec.num_blocks,
                        layer.num_kv_heads,
                        spec.block_tokens,
                        width,
                        dtype=dtype,
                        pin_memory=device.type == "cuda",  # so that copies do not wait for the device
                    )
                    for width, dtype in _parts(plane, kind)
                )
                for plane in layer.planes
            ]
            for layer in layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for planes in self._blocks for parts in planes for part in parts)

    def dump(self, number: int) -> bytes:
        """Return a block's bytes. No step may be under way."""
        return b"".join(part.numpy().tobytes() for part in self._bytes_of(number))

    def fill(self, number: int, data: memoryview) -> None:
        """Overwrite a block by the bytes that `dump` returned. No step may be under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a step that failed may have left copies under way
        start = 0
        for part in self._bytes_of(number):
            part.copy_(torch.frombuffer(data, dtype=torch.uint8, count=len(part), offset=start))
            start += len(part)

    def _bytes_of(self, number: int) -> Iterator[Tensor]:
        """Yield the parts of a block's planes as bytes."""
        for planes in self._blocks:
            for parts in planes:
                for part in parts:
                    yield part[number].reshape(-1).view(torch.uint8)

    def restore(self, pool: TorchPool, row: PrefillRow) -> None:
        """Copy a row's restored blocks to where its prompt is read."""
        runs = _runs([StoredBlock(number, index) for index, number in enumerate(row.restored_blocks)])
        for plane, stored in self._planes(pool, row):
            for first, count in runs:
                numbers = slice(first.number, first.number + count)
                self._read(stored, numbers, self._span(plane, first.index, count))

    def store(self, pool: TorchPool, row: PrefillRow) -> None:
        """Copy the blocks that a row stores from where its prompt was read."""
        runs = _runs(row.stored_blocks)
        for plane, stored in self._planes(pool, row):
            for first, count in runs:
                numbers = slice(first.number, first.number + count)
                self._write(stored, numbers, self._span(plane, first.index, count))

    def store_slot(self, pool: TorchPool, store: SlotStore) -> None:
        """Copy blocks of a sequence that has ended from its slot."""
        entries = {
            kind: [self._entries(kind, store.num_prompt_tokens, block, pool.device) for block in store.blocks]
            for kind in pool.kinds
        }
        for layer, planes in zip(pool.cache.layers, self._blocks, strict=True):
            for plane, stored in zip(layer.slots.planes, planes, strict=True):
                for block, block_entries in zip(store.blocks, entries[layer.kind], strict=True):
                    self._write(stored, block.number, plane[store.slot][:, block_entries])

    def _write(self, stored: Sequence[Tensor], numbers: int | slice, rows: Tensor) -> None:
        """Copy rows from the device into blocks of a plane."""
        parts = quantize(rows, self._kind) if self._kind.is_rounded else (rows,)
        for part, values in zip(stored, parts, strict=True):
            part[numbers].copy_(values, non_blocking=True)

    def _read(self, stored: Sequence[Tensor], numbers: slice, rows: Tensor) -> None:
        """Copy blocks of a plane into rows on the device."""
        if not self._kind.is_rounded:
            rows.copy_(stored[0][numbers], non_blocking=True)
            return
        codes, scales = (part[numbers].to(self._device, non_blocking=True) for part in stored)
        rows.copy_(dequantize(codes, scales, rows.dtype, self._kind))

    def _planes(self, pool: TorchPool, row: PrefillRow) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Yield each plane where a row's prompt is read, [kv_head, entry, width], and its stored blocks.

        There, in a scratch or a slot, tokens are in the order of the sequence.
        """
        for layer, blocks in zip(pool.cache.layers, self._blocks, strict=True):
            planes = layer.slots.planes if row.scratch is None else layer.scratch.planes
            index = row.slots[0] if row.scratch is None else row.scratch
            for plane, stored in zip(planes, blocks, strict=True):
                yield plane[index], stored

    def _entries(
        self, kind: LayerKind, num_prompt_tokens: int, block: StoredBlock, device: torch.device
    ) -> Tensor:
        """Return the entries of a block's tokens in a slot that holds all of its sequence."""
        placement = kind.policy.place(num_prompt_tokens)
        start = block.index * self._block_tokens
        index = torch.arange(start, start + self._block_tokens, device=device)
        window_start = torch.tensor(placement.window_start, device=device)
        ring_size = torch.tensor(placement.ring_size, device=device)
        return direct_entries(kind.policy.layout, index, window_start, ring_size)

    def _span(self, plane: Tensor, first: int, count: int) -> Tensor:
        """Return a view of `count` blocks of a sequence from the index `first` on, in the store's layout."""
        span = slice(first * self._block_tokens, (first + count) * self._block_tokens)
        return plane[:, span].view(len(plane), count, self._block_tokens, -1).transpose(0, 1)


def _runs(blocks: Sequence[StoredBlock]) -> list[tuple[StoredBlock, int]]:
    """Return runs of neighbours in the sequence and in the store: the first block, and how many there are.

    A copy of a run costs little more than that of a block, and uses all cores. On a GPU it needs as much
    memory again, so that runs have an end.
    """
    runs: list[tuple[StoredBlock, int]] = []
    for block in blocks:
        if runs:
            first, count = runs[-1]
            is_next = (block.number - first.number, block.index - first.index) == (count, count)
            if is_next and count < MOST_BLOCKS:
                runs[-1] = first, count + 1
                continue
        runs.append((block, 1))
    return runs

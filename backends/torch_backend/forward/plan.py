"""Builds the tensors of a forward pass from a batch: its tokens, where they are written, what they see.

Chunks of a prefill are aligned to the right of their shape, so that the last token of each is in the last
column. Padding before them, and slots without a row in a decode step, have index −1: these are written to the
spare entry, see nothing, and their outputs are never read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.interface import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow, PromptPooling
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.step import (
    Chunk,
    DecodeStep,
    DirectStep,
    KindStep,
    LayerKind,
    Observation,
    ScratchStep,
    Step,
)
from backends.torch_backend.model.attention import MASKED
from cache.policy import CachePolicy
from cache.scratch import ScratchLayout
from cache.slots import decode_entries, live_mask

_MIN_READ = 256  # entries
MIN_ROWS = 2  # torch's product with one row may round differently from the same row beside others


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The arguments of one call of the model."""

    token_ids: Tensor  # [row, token]
    positions: Tensor  # [row, token]
    step: Step

    def arguments(self, cache: ModelCache) -> dict[str, Any]:
        """Return them as the model takes them, and make the step the one that is under way in the cache."""
        cache.step = self.step
        tokens = {"input_ids": self.token_ids, "position_ids": self.positions}
        return tokens | {"past_key_values": cache, "use_cache": True, "slot_cache": cache}


def prefill_pass(
    batch: PrefillBatch, kinds: Sequence[LayerKind], scratch: ScratchLayout, device: torch.device
) -> ForwardPass:
    """Return the pass that reads a batch's chunks."""
    token_ids, index = _right_aligned(batch, device)
    reads_scratch = batch.rows[0].scratch is not None
    step = _scratch_step(batch, kinds, scratch, index) if reads_scratch else _direct_step(batch, kinds, index)
    return ForwardPass(token_ids, index.clamp(min=0), step)


def voting_pass(
    row: PrefillRow,
    kinds: Sequence[LayerKind],
    scratch: ScratchLayout,
    max_position: int,
    device: torch.device,
) -> ForwardPass:
    """Return the pass that reads tokens only for their votes: `row.echo`, then `row.ahead`.

    They are written behind the tokens that the scratch holds. No chunk reads these entries: the prompt's next
    chunk overwrites them. The tokens ahead have their true positions, with the echo before them. At the
    prompt's end, where none are ahead, the echo continues the prompt.
    """
    assert row.scratch is not None, "a slot has no room behind its tokens"
    num_held = scratch.num_held(row.num_prompt_tokens)
    token_ids = row.echo + row.ahead
    end = num_held + len(token_ids)
    last = row.num_prompt_tokens if row.ahead else row.num_prompt_tokens + len(row.echo)
    entry = torch.arange(num_held, end, device=device)[None]
    kind_steps = tuple(
        _sequential_kind_step(kind, entry, num_held, scratch.num_entries, end) for kind in kinds
    )
    has_scorer = any(kind.scorer for kind in kinds)
    observation = Observation(
        0,
        row.scratch,
        num_held,
        end,
        len(token_ids),
        len(row.echo),
        row.echo_weight,
        scores_all=row.importance is not None,
    )
    step = ScratchStep(
        rows=torch.tensor([row.scratch], device=device),
        view=slice(row.scratch, row.scratch + 1),
        kinds=kind_steps,
        num_outputs=None,
        chunks=(Chunk(row.scratch, len(token_ids)),),
        observations=(observation,) if has_scorer else (),
        query_entry=entry,
        advances_states=False,
    )
    positions = (entry + (last - end)).clamp(max=max_position)
    return ForwardPass(torch.tensor([token_ids], device=device), positions, step)


def ahead_pass(
    row: PrefillRow,
    token_id: int,
    num_ahead: int,
    kinds: Sequence[LayerKind],
    limits: tuple[int, int],
    device: torch.device,
) -> ForwardPass:
    """Return the pass that reads a token which follows a prompt, for its votes on the prompt's tokens.

    It is written behind the prompt and the `num_ahead` tokens that precede it there. `limits` are a scratch's
    entries and the largest position.
    """
    assert row.scratch is not None, "a draft has no slots"
    num_entries, max_position = limits
    index = row.num_prompt_tokens + num_ahead
    entry = torch.tensor([[index]], device=device)
    observation = Observation(0, row.scratch, row.num_prompt_tokens, index + 1, 1, scores_all=True)
    step = ScratchStep(
        rows=torch.tensor([row.scratch], device=device),
        view=slice(row.scratch, row.scratch + 1),
        kinds=tuple(_sequential_kind_step(kind, entry, index, num_entries, index + 1) for kind in kinds),
        num_outputs=None,
        chunks=(Chunk(row.scratch, 1),),
        observations=(observation,),
        query_entry=entry,
    )
    return ForwardPass(torch.tensor([[token_id]], device=device), entry.clamp(max=max_position), step)


def _right_aligned(batch: PrefillBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the batch's tokens and their indices, [row, token]."""
    num_rows = batch.shape.num_rows
    num_tokens = batch.shape.num_tokens
    token_ids = [[0] * num_tokens for _ in range(num_rows)]
    index = [[-1] * num_tokens for _ in range(num_rows)]
    for i, row in enumerate(batch.rows):
        first = num_tokens - len(row.token_ids)
        token_ids[i][first:] = row.token_ids
        index[i][first:] = range(row.start, row.start + len(row.token_ids))
    both = torch.tensor([token_ids, index], device=device)  # one copy to the device
    return both[0], both[1]


def _direct_step(batch: PrefillBatch, kinds: Sequence[LayerKind], index: Tensor) -> DirectStep:
    slots = [row.slots[0] for row in batch.rows]
    first = min(row.start for row in batch.rows)
    longest = max(row.start + len(row.token_ids) for row in batch.rows)
    return DirectStep(
        rows=_padded(slots, batch, index.device),
        view=_view(slots, batch),
        kinds=tuple(
            _sequential_kind_step(kind, index, first, kind.policy.layout.capacity, longest) for kind in kinds
        ),
        num_outputs=_num_outputs(batch.rows),
        chunks=_chunks(slots, batch),
    )


def _scratch_step(
    batch: PrefillBatch, kinds: Sequence[LayerKind], scratch: ScratchLayout, index: Tensor
) -> ScratchStep:
    rows = batch.rows
    scratches = [row.scratch for row in rows if row.scratch is not None]
    evicted = [scratch.num_evicted(row.start, row.num_prompt_tokens) for row in rows]
    starts = [row.start - num_evicted for row, num_evicted in zip(rows, evicted, strict=True)]
    longest = max(start + len(row.token_ids) for start, row in zip(starts, rows, strict=True))
    entry = torch.where(index >= 0, index - _padded(evicted, batch, index.device)[:, None], -1)
    return ScratchStep(
        rows=_padded(scratches, batch, index.device),
        view=_view(scratches, batch),
        kinds=tuple(
            _sequential_kind_step(kind, entry, min(starts), scratch.num_entries, longest) for kind in kinds
        ),
        num_outputs=_num_outputs(rows),
        chunks=_chunks(scratches, batch),
        observations=tuple(_observations(rows, evicted, kinds)),
        query_entry=entry,
    )


def _padded(values: list[int], batch: PrefillBatch, device: torch.device) -> Tensor:
    """Return a value for each row of the batch's shape: 0 for rows of padding alone."""
    return torch.tensor(values + [0] * (batch.shape.num_rows - len(values)), device=device)


def _view(rows: list[int], batch: PrefillBatch) -> slice | None:
    return slice(rows[0], rows[0] + 1) if batch.shape.num_rows == 1 else None


def _chunks(targets: list[int], batch: PrefillBatch) -> tuple[Chunk, ...]:
    return tuple(Chunk(target, len(row.token_ids)) for target, row in zip(targets, batch.rows, strict=True))


def _num_outputs(rows: Sequence[PrefillRow]) -> int | None:
    """Return how many of each row's last tokens' outputs are read; None: all."""
    return None if any(row.score or row.pooling is PromptPooling.MEAN for row in rows) else MIN_ROWS


def _observations(
    rows: Sequence[PrefillRow], evicted: Sequence[int], kinds: Sequence[LayerKind]
) -> list[Observation]:
    """Return the rows whose chunk has queries of an observation window, where a layer must choose."""
    scored = [(kind.policy, kind.scorer) for kind in kinds if kind.scorer is not None]
    observations = []
    for i, (row, num_evicted) in enumerate(zip(rows, evicted, strict=True)):
        if row.importance is not None and row.scratch is not None:
            length = row.num_prompt_tokens
            num_queries = 1 if row.importance.num_ahead else None
            window = num_queries or max(scorer.observation_window for _, scorer in scored)
            if row.start + len(row.token_ids) > length - window:
                observations.append(Observation(i, row.scratch, length, length, num_queries, scores_all=True))
            continue
        windows = [scorer.observation_window for policy, scorer in scored if _must_choose(policy, row)]
        observes = row.start + len(row.token_ids) > row.num_prompt_tokens - max(windows, default=0)
        if row.scratch is not None and row.slots and observes:
            num_held = row.num_prompt_tokens - num_evicted
            observations.append(Observation(i, row.scratch, num_held, num_held))
    return observations


def _must_choose(policy: CachePolicy, row: PrefillRow) -> bool:
    """Return whether a prompt has more candidates than kept entries."""
    num_candidates = policy.place(row.num_prompt_tokens).window_start - policy.layout.num_sink
    return num_candidates > policy.layout.num_kept


def _read_length(longest: int, limit: int) -> int:
    """Return how many entries to read for sequences of up to `longest` tokens: a power of two, or 3/4 of one.

    There are thus only two lengths in an octave, and few shapes.
    """
    octave = max(1 << (longest - 1).bit_length(), _MIN_READ)
    return min(octave * 3 // 4 if longest <= octave * 3 // 4 else octave, limit)


def _sequential_kind_step(
    kind: LayerKind, query_entry: Tensor, first: int, capacity: int, longest: int
) -> KindStep:
    """Return the step of layers whose entries are in the order of the sequence.

    They always are in a scratch, and in the slot of a direct prompt. Every chunk begins at the entry `first`
    or later, and ends at `longest` or before.
    """
    # Without a sliding window, every query sees all entries before the first chunk: these need no mask.
    num_unmasked = first if kind.sliding_window is None else 0
    entry = torch.arange(num_unmasked, longest, device=query_entry.device)
    query = query_entry[..., None]
    is_seen = entry <= query
    if kind.sliding_window is not None:
        is_seen &= entry > query - kind.sliding_window
    entries = torch.where(query_entry >= 0, query_entry, capacity)
    return KindStep(entries, _bias(is_seen), num_unmasked, last_seen=query_entry)


def _bias(is_seen: Tensor) -> Tensor:
    return torch.zeros(is_seen.shape, device=is_seen.device).masked_fill_(~is_seen, MASKED)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The tokens that a decode step reads: of each of the first slots, or any number of some slots' tokens.

    All values that change from step to step and from batch to batch are in `inputs`, so that a recorded step
    finds them in one tensor.
    """

    kinds: tuple[LayerKind, ...]
    # [3 + 2 * kind, row]: the tokens to read, their indices (−1 for a slot without a token), the rows' slots,
    # and for each kind the window starts, then for each kind the ring sizes.
    inputs: Tensor
    read_lengths: tuple[int, ...]  # for each kind
    max_position: int
    is_by_slot: bool = True  # row i has slot i

    @property
    def bucket(self) -> tuple[int, tuple[int, ...]]:
        """The step's shape: the number of rows, and the entries that are read."""
        return self.inputs.shape[1], self.read_lengths

    @property
    def is_live(self) -> Tensor:
        return self.inputs[1] >= 0

    def forward_pass(self) -> ForwardPass:
        """Return the next step's pass."""
        token_ids, index, slots, *placements = self.inputs
        window_starts = placements[: len(self.kinds)]
        ring_sizes = placements[len(self.kinds) :]
        is_live = self.is_live
        kind_steps = []
        for kind, window_start, ring_size, read_length in zip(
            self.kinds, window_starts, ring_sizes, self.read_lengths, strict=True
        ):
            layout = kind.policy.layout
            entries = torch.where(is_live, decode_entries(layout, index, ring_size), layout.capacity)
            is_seen = live_mask(layout, index + 1, window_start, ring_size, read_length)
            # Every token after the first of a full ring moves the oldest one there to the store.
            store = kind.policy.store
            num_left = index + 1 - layout.capacity
            num_stored = None if store is None else num_left.clamp(0, store.num_tokens)
            kind_steps.append(KindStep(entries[:, None], _bias(is_seen)[:, None], num_stored=num_stored))
        view = slice(0, index.shape[0]) if self.is_by_slot else None
        step = DecodeStep(slots, view, kinds=tuple(kind_steps), is_live=is_live)
        # A launch may run past the end of a sequence: what it draws there is dropped, but a learned position
        # beyond the last one would be an error.
        return ForwardPass(token_ids[:, None], index.clamp(0, self.max_position)[:, None], step)

    def advance(self, token_ids: Tensor) -> None:
        """Move on to the next step, which reads `token_ids` [slot]."""
        self.inputs[1] += self.is_live
        self.inputs[0] = token_ids


def decode_plan(
    batch: DecodeBatch,
    kinds: Sequence[LayerKind],
    row_limits: tuple[int, int],
    max_model_len: int,
    device: torch.device,
) -> DecodePlan:
    """Return the plan of a decode batch before its first step.

    `row_limits` are the fewest rows of a step, and the most: the pool's slots.
    """
    size = _bucket_size(max(row.slot for row in batch.rows) + 1, *row_limits)
    rows = {row.slot: row for row in batch.rows}
    inputs = _decode_inputs(rows, list(range(size)), kinds, device)
    read_lengths = tuple(_decode_read_length(kind, batch.rows, batch.num_steps) for kind in kinds)
    return DecodePlan(tuple(kinds), inputs, read_lengths, max_model_len - 1)


def verifying_plan(
    rows: Sequence[DecodeRow], kinds: Sequence[LayerKind], max_model_len: int, device: torch.device
) -> DecodePlan:
    """Return the plan of one step that reads these tokens, of which several may be of one slot."""
    inputs = _decode_inputs(dict(enumerate(rows)), [row.slot for row in rows], kinds, device)
    read_lengths = tuple(_decode_read_length(kind, rows, 1) for kind in kinds)
    return DecodePlan(tuple(kinds), inputs, read_lengths, max_model_len - 1, is_by_slot=False)


def _decode_inputs(
    rows: Mapping[int, DecodeRow], slots: list[int], kinds: Sequence[LayerKind], device: torch.device
) -> Tensor:
    """Return `DecodePlan.inputs`: `slots` has one for each row of the step, and `rows` those with a token."""
    size = len(slots)
    token_ids = [0] * size
    index = [-1] * size
    window_starts = [[0] * size for _ in kinds]
    ring_sizes = [[1] * size for _ in kinds]
    for position, row in rows.items():
        token_ids[position] = row.token_id
        index[position] = row.index
        for i, kind in enumerate(kinds):
            placement = kind.policy.place(row.num_prompt_tokens)
            window_starts[i][position] = placement.window_start
            ring_sizes[i][position] = placement.ring_size
    return torch.tensor([token_ids, index, slots, *window_starts, *ring_sizes], device=device)


def idle_plans(
    kinds: Sequence[LayerKind], num_slots: int, max_model_len: int, max_steps: int, device: torch.device
) -> list[DecodePlan]:
    """Return a plan without rows for every shape of a decode batch, the largest first.

    All share one input tensor.
    """
    # The values of slots without a row: index −1, and a ring size of 1, by which indices are divided.
    inputs = torch.zeros(3 + 2 * len(kinds), num_slots, dtype=torch.int64, device=device)
    inputs[1] = -1
    inputs[2] = torch.arange(num_slots)
    inputs[3 + len(kinds) :] = 1
    sizes = {_bucket_size(num_read, MIN_ROWS, num_slots) for num_read in range(1, num_slots + 1)}
    lengths = set()
    longest = 0
    while longest < max_model_len + max_steps:
        longest = _read_length(longest + 1, max_model_len + max_steps)
        for uses_kept in (False, True):
            lengths.add(tuple(_entries_read(kind, longest, uses_kept=uses_kept) for kind in kinds))
    return [
        DecodePlan(tuple(kinds), inputs[:, :size], read_lengths, max_model_len - 1)
        for size in sorted(sizes, reverse=True)
        for read_lengths in sorted(lengths, reverse=True)
    ]


def _bucket_size(num_read: int, min_rows: int, num_slots: int) -> int:
    """Return how many slots a step runs over that must read the first `num_read` of them: a power of two.

    There are few such shapes. Little is wasted, because the lowest free slot is always the next to be taken.
    """
    return min(max(1 << (num_read - 1).bit_length(), min_rows), num_slots)


def _decode_read_length(kind: LayerKind, rows: Sequence[DecodeRow], num_steps: int) -> int:
    uses_kept = any(kind.policy.place(row.num_prompt_tokens).num_kept_used for row in rows)
    return _entries_read(kind, max(row.index for row in rows) + num_steps, uses_kept=uses_kept)


def _entries_read(kind: LayerKind, longest: int, *, uses_kept: bool) -> int:
    """Return how many entries to read for sequences of up to `longest` tokens.

    Kept entries are a slot's last, so that a step that uses them reads the whole slot.
    """
    layout = kind.policy.layout
    return layout.capacity if uses_kept and layout.num_kept > 0 else _read_length(longest, layout.capacity)

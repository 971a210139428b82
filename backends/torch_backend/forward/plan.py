"""From a batch's integers to the tensors of a forward pass: what is read, where it is written, and who sees what.

Chunks of a prefill are aligned to the right of their shape, so that the last token of each is in the last column. What is left over, and
every slot that a decode step has no row for, has index −1: it is written to the spare entry, sees nothing, and nobody reads its output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.interface import DecodeBatch, DecodeRow, PrefillBatch, PrefillRow, PromptPooling
from backends.torch_backend.forward.cache import KindStep, LayerKind, ModelCache, Observation, Step
from backends.torch_backend.model.attention import HIDDEN
from cache.policy import CachePolicy
from cache.scratch import ScratchLayout
from cache.slots import decode_entries, direct_entries, direct_index, live_mask

_SMALLEST_READ = 256  # entries
_FEWEST_ROWS = 2  # a product with a single row may round differently from the same row in company


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The arguments of one call of the model."""

    token_ids: Tensor  # [row, token]
    positions: Tensor  # [row, token]
    step: Step

    def arguments(self, cache: ModelCache) -> dict[str, Any]:
        """Return them as the model takes them. The cache is told of the step."""
        cache.step = self.step
        tokens = {"input_ids": self.token_ids, "position_ids": self.positions}
        return tokens | {"past_key_values": cache, "use_cache": True, "slot_cache": cache}


def prefill_pass(
    batch: PrefillBatch, kinds: Sequence[LayerKind], scratch: ScratchLayout, device: torch.device
) -> ForwardPass:
    """Return the pass that reads a batch's chunks."""
    rows, into_scratch = batch.rows, batch.rows[0].scratch is not None
    token_ids, index = _aligned(batch, device)
    padding = [0] * (batch.shape.num_rows - len(rows))
    places = torch.tensor([_place(row) for row in rows] + padding, device=device)
    only_place = _place(rows[0]) if batch.shape.num_rows == 1 else None
    if not into_scratch:
        longest = max(row.start + len(row.token_ids) for row in rows)
        kind_steps = tuple(_direct_step(kind, index, rows, longest) for kind in kinds)
        step = Step(places, kind_steps, only_place=only_place, num_asked=_num_asked(rows))
        return ForwardPass(token_ids, index.clamp(min=0), step)
    given_up = [scratch.num_evicted(row.start, row.num_prompt_tokens) for row in rows]
    starts = [row.start - num for row, num in zip(rows, given_up, strict=True)]
    longest = max(start + len(row.token_ids) for start, row in zip(starts, rows, strict=True))
    entry = torch.where(index >= 0, index - torch.tensor(given_up + padding, device=device)[:, None], -1)
    kind_steps = tuple(
        _sequential_step(kind, entry, min(starts), scratch.num_entries, longest) for kind in kinds
    )
    observations = tuple(_observations(rows, given_up, kinds))
    query_entry = entry if observations else None
    step = Step(
        places,
        kind_steps,
        into_scratch,
        only_place=only_place,
        query_entry=query_entry,
        observations=observations,
        num_asked=_num_asked(rows),
    )
    return ForwardPass(token_ids, index.clamp(min=0), step)


def look_ahead_pass(
    row: PrefillRow, kinds: Sequence[LayerKind], scratch: ScratchLayout, device: torch.device
) -> ForwardPass:
    """Return the pass that reads a prompt's last tokens, at their positions but behind what its scratch holds, and lets them vote on it.

    What it writes lies behind what the prompt's next chunk, or any other, reads.
    """
    assert row.scratch is not None, "only a scratch is outgrown"
    num_held, num_ahead = scratch.num_held(row.num_prompt_tokens), len(row.ahead)
    end = num_held + num_ahead
    entry = torch.arange(num_held, end, device=device)[None]
    kind_steps = tuple(_sequential_step(kind, entry, num_held, scratch.num_entries, end) for kind in kinds)
    observations = (
        (Observation(0, row.scratch, num_held, end),) if any(kind.chooser for kind in kinds) else ()
    )
    step = Step(
        torch.tensor([row.scratch], device=device),
        kind_steps,
        True,
        only_place=row.scratch,
        query_entry=entry,
        observations=observations,
    )
    return ForwardPass(torch.tensor([row.ahead], device=device), entry + (row.num_prompt_tokens - end), step)


def _num_asked(rows: Sequence[PrefillRow]) -> int | None:
    """Return how many of each row's last tokens something is drawn or made of; None: all."""
    return None if any(row.score or row.pooling is PromptPooling.MEAN for row in rows) else _FEWEST_ROWS


def _place(row: PrefillRow) -> int:
    return row.slots[0] if row.scratch is None else row.scratch


def _aligned(batch: PrefillBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the batch's tokens and their indices, [row, token]."""
    num_rows, num_tokens = batch.shape.num_rows, batch.shape.num_tokens
    token_ids = [[0] * num_tokens for _ in range(num_rows)]
    index = [[-1] * num_tokens for _ in range(num_rows)]
    for position, row in enumerate(batch.rows):
        length = len(row.token_ids)
        token_ids[position][num_tokens - length :] = row.token_ids
        index[position][num_tokens - length :] = range(row.start, row.start + length)
    both = torch.tensor([token_ids, index], device=device)
    return both[0], both[1]


def _read_length(longest: int, limit: int) -> int:
    """Return how many entries to read for sequences of up to `longest` tokens: two lengths an octave, so that there are few of them."""
    octave = max(1 << (longest - 1).bit_length(), _SMALLEST_READ)
    return min(octave * 3 // 4 if longest <= octave * 3 // 4 else octave, limit)


def _sequential_step(
    kind: LayerKind, query_entry: Tensor, first: int, capacity: int, longest: int
) -> KindStep:
    """Entries are in the order of the sequence, in a scratch always, in a slot where there is nothing to choose from.

    Every chunk begins at the entry `first` or later, and ends at `longest` or before.
    """
    num_open = first if kind.sliding_window is None else 0
    entry = torch.arange(num_open, longest, device=query_entry.device)
    query = query_entry[..., None]
    is_seen = entry <= query
    if kind.sliding_window is not None:
        is_seen &= entry > query - kind.sliding_window
    return KindStep(
        torch.where(query_entry >= 0, query_entry, capacity), _bias(is_seen), num_open, query_entry
    )


def _direct_step(kind: LayerKind, index: Tensor, rows: Sequence[PrefillRow], longest: int) -> KindStep:
    """The slots lose nothing of these prompts, so that a query sees what is there and not after it."""
    layout = kind.policy.layout
    placements = [kind.policy.place(row.num_prompt_tokens) for row in rows]
    if all(placement.window_start <= layout.num_sink for placement in placements):
        return _sequential_step(kind, index, min(row.start for row in rows), layout.capacity, longest)
    padding = index.shape[0] - len(rows)
    num_tokens, window_start, ring_size = torch.tensor(
        [
            [row.start + len(row.token_ids) for row in rows] + [0] * padding,
            [placement.window_start for placement in placements] + [0] * padding,
            [placement.ring_size for placement in placements] + [1] * padding,
        ],
        device=index.device,
    )
    entries = direct_entries(layout, index, window_start[:, None], ring_size[:, None])
    uses_kept = any(placement.num_kept_used for placement in placements)
    read_length = layout.capacity if uses_kept else _read_length(longest, layout.capacity)
    held = direct_index(layout, num_tokens, window_start, ring_size, read_length)[:, None]
    is_seen = (held >= 0) & (held <= index[..., None])
    return KindStep(torch.where(index >= 0, entries, layout.capacity), _bias(is_seen))


def _bias(is_seen: Tensor) -> Tensor:
    return torch.zeros(is_seen.shape, device=is_seen.device).masked_fill_(~is_seen, HIDDEN)


def _observations(
    rows: Sequence[PrefillRow], given_up: Sequence[int], kinds: Sequence[LayerKind]
) -> Iterable[Observation]:
    """Yield the rows whose chunk holds queries of an observation window, where a layer has more candidates than kept entries."""
    choosing = [(kind.policy, kind.chooser) for kind in kinds if kind.chooser is not None]
    for position, (row, num_given_up) in enumerate(zip(rows, given_up, strict=True)):
        window = max(
            (scorer.observation_window for policy, scorer in choosing if _chooses(policy, row)), default=0
        )
        if (
            row.scratch is not None
            and row.slots
            and row.start + len(row.token_ids) > row.num_prompt_tokens - window
        ):
            num_held = row.num_prompt_tokens - num_given_up
            yield Observation(position, row.scratch, num_held, num_held)


def _chooses(policy: CachePolicy, row: PrefillRow) -> bool:
    return policy.place(row.num_prompt_tokens).window_start - policy.layout.num_sink > policy.layout.num_kept


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Where the sequences of a decode batch stand, over the first slots, as many as hold all live ones.

    All that changes from step to step and from batch to batch is in `numbers`, so that a recorded step finds it in one place.
    """

    kinds: tuple[LayerKind, ...]
    numbers: Tensor  # [2 + 2 * kind, slot]: tokens to be read, their indices (−1 where idle), and each kind's window starts and ring sizes
    read_lengths: tuple[int, ...]  # a kind each
    max_position: int

    @property
    def bucket(self) -> tuple[int, tuple[int, ...]]:
        """The step's shape: slots, and the entries that are read."""
        return self.numbers.shape[1], self.read_lengths

    @property
    def is_live(self) -> Tensor:
        return self.numbers[1] >= 0

    def forward_pass(self) -> ForwardPass:
        """Return the next step's pass."""
        token_ids, index, *placements = self.numbers
        is_live, kind_steps = self.is_live, []
        window_starts, ring_sizes = placements[: len(self.kinds)], placements[len(self.kinds) :]
        for kind, window_start, ring_size, read_length in zip(
            self.kinds, window_starts, ring_sizes, self.read_lengths, strict=True
        ):
            layout = kind.policy.layout
            entries = torch.where(is_live, decode_entries(layout, index, ring_size), layout.capacity)
            is_seen = live_mask(layout, index + 1, window_start, ring_size, read_length)
            kind_steps.append(KindStep(entries[:, None], _bias(is_seen)[:, None]))
        step = Step(torch.arange(index.shape[0], device=index.device), tuple(kind_steps), reads_first=True)
        # A launch may run past the end of a sequence, for nothing; a learned position beyond the last would be an error.
        return ForwardPass(token_ids[:, None], index.clamp(0, self.max_position)[:, None], step)

    def advance(self, token_ids: Tensor) -> None:
        """Go on to the next step, which reads `token_ids` [slot]."""
        self.numbers[1] += self.is_live
        self.numbers[0] = token_ids


def decode_plan(
    batch: DecodeBatch, kinds: Sequence[LayerKind], num_slots: int, max_model_len: int, device: torch.device
) -> DecodePlan:
    """Return the plan of a decode batch, before its first step."""
    rows, num_slots = batch.rows, _num_slots_read(batch.rows, num_slots)
    idle = [0] * num_slots
    token_ids, index = idle.copy(), [-1] * num_slots
    starts, sizes = [idle.copy() for _ in kinds], [[1] * num_slots for _ in kinds]
    for row in rows:
        token_ids[row.slot], index[row.slot] = row.token_id, row.index
        for kind, start, size in zip(kinds, starts, sizes, strict=True):
            placement = kind.policy.place(row.num_prompt_tokens)
            start[row.slot], size[row.slot] = placement.window_start, placement.ring_size
    numbers = torch.tensor([token_ids, index, *starts, *sizes], device=device)
    return DecodePlan(
        tuple(kinds), numbers, tuple(_decode_read_length(kind, batch) for kind in kinds), max_model_len - 1
    )


def idle_plans(
    kinds: Sequence[LayerKind], num_slots: int, max_model_len: int, max_steps: int, device: torch.device
) -> list[DecodePlan]:
    """Return a plan without a live slot for every shape that a decode batch may have, the largest first. All share one tensor."""
    numbers = torch.zeros(2 + 2 * len(kinds), num_slots, dtype=torch.int64, device=device)
    numbers[1], numbers[2 + len(kinds) :] = -1, 1
    sizes = {_bucket_of_slots(number, num_slots) for number in range(1, num_slots + 1)}
    lengths = set()
    longest = 0
    while longest < max_model_len + max_steps:
        longest = _read_length(longest + 1, max_model_len + max_steps)
        for uses_kept in (False, True):
            lengths.add(tuple(_entries_read(kind, longest, uses_kept=uses_kept) for kind in kinds))
    return [
        DecodePlan(tuple(kinds), numbers[:, :size], of_kinds, max_model_len - 1)
        for size in sorted(sizes, reverse=True)
        for of_kinds in sorted(lengths, reverse=True)
    ]


def _num_slots_read(rows: Sequence[DecodeRow], num_slots: int) -> int:
    return _bucket_of_slots(max(row.slot for row in rows) + 1, num_slots)


def _bucket_of_slots(highest: int, num_slots: int) -> int:
    """Return how many of the slots take part: few numbers, and the lowest free slot is always the next to be taken."""
    return min(max(1 << (highest - 1).bit_length(), _FEWEST_ROWS), num_slots)


def _decode_read_length(kind: LayerKind, batch: DecodeBatch) -> int:
    uses_kept = any(kind.policy.place(row.num_prompt_tokens).num_kept_used for row in batch.rows)
    return _entries_read(kind, max(row.index for row in batch.rows) + batch.num_steps, uses_kept=uses_kept)


def _entries_read(kind: LayerKind, longest: int, *, uses_kept: bool) -> int:
    """Return how many entries hold all that sequences of up to `longest` tokens see; kept ones lie at a slot's end."""
    layout = kind.policy.layout
    return layout.capacity if uses_kept and layout.num_kept > 0 else _read_length(longest, layout.capacity)

"""The engine's statistics after each step: plain values for metrics and for the slots' page."""

import enum
from dataclasses import dataclass

from backends.interface import ArchiveStats, Batch, BatchResult, PrefillBatch


class StepKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One step of the device."""

    kind: StepKind
    num_rows: int
    num_tokens: int  # prompt tokens read, or tokens drawn for live sequences, also those discarded later
    num_steps: int  # decode steps of the launch; 1 for a prefill
    elapsed: float  # seconds by the backend's clock
    restore_time: float = 0.0  # of these, restoring stored blocks
    num_drafts: int = 0  # rows that had one
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of these

    @classmethod
    def of(cls, batch: Batch, result: BatchResult) -> "BatchRecord":
        num_rows = len(batch.rows)
        if isinstance(batch, PrefillBatch):
            num_tokens = sum(len(row.token_ids) for row in batch.rows)
            return cls(StepKind.PREFILL, num_rows, num_tokens, 1, result.elapsed, result.restore_time)
        num_tokens = sum(map(len, result.tokens))
        return cls(
            StepKind.DECODE,
            num_rows,
            num_tokens,
            1 if batch.num_draft_tokens else num_tokens // num_rows,
            result.elapsed,
            num_drafts=sum(bool(row.draft_token_ids) for row in batch.rows),
            num_draft_tokens=batch.num_draft_tokens,
            num_accepted_tokens=num_tokens - num_rows if batch.num_draft_tokens else 0,
        )


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state of one pool at one moment."""

    num_waiting: int
    num_slots_in_use: int


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A held slot and the progress of its sequence, in tokens.

    `num_live` counts entries of a full-attention layer.
    """

    pool: int
    slot: int
    request_id: str
    choice: int
    is_decoding: bool
    num_prompt_tokens: int
    num_prefill_tokens: int  # of the prompt, those that prefill reads
    num_computed_tokens: int
    num_output_tokens: int
    num_live: int


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The use of stored prefixes, in tokens and blocks since the start; `num_blocks` now."""

    num_queried_tokens: int = 0  # of prompts whose reading began
    num_hit_tokens: int = 0  # of these, restored
    num_evicted_blocks: int = 0
    num_blocks: int = 0
    archive: ArchiveStats | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's state at one moment. Sequences are choices."""

    num_running: int  # admitted and not ended
    num_waiting: int
    num_slots_in_use: int
    num_scratch_in_use: int
    num_unread_prompt_tokens: int  # of the prompts that prefill reads now
    num_discarded_tokens: int  # since the start, of the sequences that have ended
    pools: tuple[PoolStats, ...]  # in the backend's order
    prefixes: PrefixStats = PrefixStats()
    slots: tuple[SlotUse, ...] = ()  # the held slots, if they are watched


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One turn of the engine's loop.

    `batch` is None when there was nothing to run, or when the step failed.
    """

    batch: BatchRecord | None
    stats: SchedulerStats
    has_failed: bool = False

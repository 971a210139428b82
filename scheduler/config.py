"""What an operator may choose about scheduling."""

import math
from dataclasses import dataclass

from scheduler.waiting import QueueOrder


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's limits.

    `max_num_waiting` is per pool and counts sequences (choices) beyond those for which a slot is free. One
    tenant may have as many sequences as there are slots, and `max_num_waiting_per_tenant` more. The server
    enforces the tenant's limit when it issues admission tickets.

    `max_inter_token_latency` bounds, in seconds, the time between two tokens of a live sequence while prompts
    are read. Between two decode launches, prefill reads as many and as large chunks as are expected to fit.
    The rest of the time is for more decode steps. One step of the cheapest shape always runs, even when it
    exceeds the bound, so prefill never stops.

    A decode step verifies up to `num_speculative_tokens` guessed tokens where one or two sequences are live.

    `max_background_slots` are the slots of a pool that background sequences may hold at once. None means
    half of the slots, and at least one.
    """

    order: QueueOrder = QueueOrder.FAIR
    max_num_waiting: int = 256
    max_num_waiting_per_tenant: int | None = None  # None: no limit for one tenant
    max_inter_token_latency: float = 0.2
    max_decode_steps: int = 4  # steps of one decode launch, when no sequence waits for a slot
    num_speculative_tokens: int = 7  # of a draft that one decode step verifies; 0: none
    max_background_slots: int | None = None
    reports_slots: bool = False  # each step's statistics say which request holds which slot

    def __post_init__(self) -> None:
        if self.max_num_waiting < 0:
            raise ValueError(f"max_num_waiting must be at least 0, got {self.max_num_waiting}")
        if math.isnan(self.max_inter_token_latency) or self.max_inter_token_latency < 0:
            raise ValueError(
                f"max_inter_token_latency must be at least 0 seconds, got {self.max_inter_token_latency}"
            )
        if self.max_decode_steps < 1:
            raise ValueError(f"max_decode_steps must be at least 1, got {self.max_decode_steps}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must be at least 0, got {self.num_speculative_tokens}")
        if self.max_background_slots is not None and self.max_background_slots < 1:
            raise ValueError(f"max_background_slots must be at least 1, got {self.max_background_slots}")

    def num_background_slots(self, num_slots: int) -> int:
        """Return how many of a pool's slots background sequences may hold at once."""
        if self.max_background_slots is None:
            return max(1, num_slots // 2)
        return min(self.max_background_slots, num_slots)

"""What an operator may choose about scheduling."""

import math
from dataclasses import dataclass

from scheduler.waiting import QueueOrder


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_waiting` counts, pool by pool, sequences (choices) beyond those for which a slot is free; one tenant may have as many as
    there are slots and `max_num_waiting_per_tenant` more, which is counted where places are given away.

    `max_inter_token_latency` bounds, in seconds, the time between two tokens of a live sequence while prompts are being read: between two
    decode launches, as many and as large chunks are read as are expected to fit, and what they leave is for more decode steps. One step of
    the cheapest shape is run whatever it takes, so that reading never stops either.

    `max_background_slots` are those of a pool that background sequences may hold at once; None: half of them, and at least one.
    """

    order: QueueOrder = QueueOrder.FAIR
    max_num_waiting: int = 256
    max_num_waiting_per_tenant: int | None = None  # None: no share, the queue is for whoever comes first
    max_inter_token_latency: float = 0.2
    max_decode_steps: int = 4  # steps of one decode launch, when nothing waits for a slot
    max_background_slots: int | None = None
    reports_slots: bool = False  # each step tells who holds which slot

    def __post_init__(self) -> None:
        if self.max_num_waiting < 0:
            raise ValueError(f"max_num_waiting must be at least 0, got {self.max_num_waiting}")
        if math.isnan(self.max_inter_token_latency) or self.max_inter_token_latency < 0:
            raise ValueError(
                f"max_inter_token_latency must be at least 0 seconds, got {self.max_inter_token_latency}"
            )
        if self.max_decode_steps < 1:
            raise ValueError(f"max_decode_steps must be at least 1, got {self.max_decode_steps}")
        if self.max_background_slots is not None and self.max_background_slots < 1:
            raise ValueError(f"max_background_slots must be at least 1, got {self.max_background_slots}")

    def num_background_slots(self, num_slots: int) -> int:
        """Return how many of a pool's slots background sequences may hold at once."""
        return (
            max(1, num_slots // 2)
            if self.max_background_slots is None
            else min(self.max_background_slots, num_slots)
        )

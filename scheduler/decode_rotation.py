"""Which pool decodes next, and how many steps its launch has."""

from collections.abc import Sequence

from backends.interface import DecodeBatch
from scheduler.pacing import Pacing
from scheduler.pool_state import PoolState
from scheduler.waiting import WaitingQueue


class DecodeRotation:
    """Pools decode in turns: once one has decoded, all do before anything is read, and none takes time that belongs to another."""

    def __init__(self, pools: Sequence[PoolState], max_steps: int) -> None:
        self._pools, self._max_steps = pools, max_steps
        self._due: list[PoolState] = []  # have yet to decode before any does again
        self._steps_in_time: int | None = None  # of each of them; None: any number

    @property
    def is_under_way(self) -> bool:
        return any(pool.decoding for pool in self._due)

    def decoding(self) -> list[int]:
        """Return the pools in which sequences decode."""
        return [pool.number for pool in self._pools if pool.decoding]

    def next_batch(self, waiting: WaitingQueue, pacing: Pacing, now: float) -> DecodeBatch | None:
        """Return the next launch, or None when no sequence decodes."""
        if not self.is_under_way:
            self._due = list(self._pools)
            self._steps_in_time = pacing.max_decode_steps(self.decoding(), now)
        self._due = [pool for pool in self._due if pool.decoding]
        if not self._due:
            return None
        pool = self._due.pop(0)
        num_steps = self._num_steps(pool, waiting.num_waiting(pool.number))
        return DecodeBatch(
            tuple(request.decode_row(num_steps) for request in pool.decoding.values()), num_steps, pool.number
        )

    def _num_steps(self, pool: PoolState, num_waiting: int) -> int:
        """A launch never goes beyond the shortest answer's length, and when anyone waits it has no step after one that may free a slot."""
        requests = pool.decoding.values()
        limits = [self._max_steps, *(request.max_decode_steps for request in requests)]
        if self._steps_in_time is not None:
            limits.append(self._steps_in_time)
        if num_waiting:
            limits += [request.num_forced_left for request in requests]
        return max(1, min(limits))

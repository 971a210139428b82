"""The bound on the sequences that are in the server at once: in slots, waiting, or being rendered.

A sequence is counted once, from before any work is done for it until its end. So a burst cannot slip through
between a check and a count. One tenant may hold a share only. The module does not depend on requests.
"""

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

from server.engine.client import QueueFullError


class SequenceLimit:
    """Counts sequences on one thread: the event loop's."""

    def __init__(self, limit: int, limit_per_tenant: int | None = None) -> None:
        self._limit = limit
        self._limit_per_tenant = limit if limit_per_tenant is None else min(limit, limit_per_tenant)
        self._num_held: Counter[str] = Counter()  # by tenant
        self.all_released = asyncio.Event()
        self.all_released.set()

    @property
    def num_held(self) -> int:
        return self._num_held.total()

    def acquire(self, num_sequences: int, tenant: str = "") -> "SequenceTicket":
        """Count `num_sequences` sequences.

        Raises `QueueFullError`, and counts none, when they exceed a limit.
        """
        if self._num_held[tenant] + num_sequences > self._limit_per_tenant:
            raise QueueFullError(num_sequences, self._num_held[tenant], self._limit_per_tenant)
        if self.num_held + num_sequences > self._limit:
            raise QueueFullError(num_sequences, self.num_held, self._limit)
        self._num_held[tenant] += num_sequences
        self.all_released.clear()
        return SequenceTicket(self, num_sequences, tenant)

    def release(self, num_sequences: int, tenant: str) -> None:
        self._num_held[tenant] -= num_sequences
        if self._num_held[tenant] == 0:
            del self._num_held[tenant]
        if not self._num_held:
            self.all_released.set()


class SequenceTicket:
    """Releases its sequences once: by `release`, or at the end of its `with` block."""

    def __init__(self, limit: SequenceLimit, num_sequences: int, tenant: str) -> None:
        self._limit = limit
        self._num_sequences = num_sequences
        self._tenant = tenant

    def release(self) -> None:
        """Release the sequences. A second call does nothing."""
        self._limit.release(self._num_sequences, self._tenant)
        self._num_sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

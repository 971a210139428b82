"""How many sequences may be in the server at once: those in slots, those that wait, and those whose prompt is being rendered.

A place is counted once, from before any work is done for its sequence until its end, so that a burst cannot slip through between the check
and the count. One tenant may hold a share of the places only. It knows nothing of requests.
"""

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

from server.engine.client import QueueFullError


class Places:
    """A number of places, taken and given back on one thread."""

    def __init__(self, limit: int, limit_per_tenant: int | None = None) -> None:
        self._limit = limit
        self._limit_per_tenant = limit if limit_per_tenant is None else min(limit, limit_per_tenant)
        self._num_taken: Counter[str] = Counter()
        self.all_free = asyncio.Event()
        self.all_free.set()

    @property
    def num_taken(self) -> int:
        return self._num_taken.total()

    def take(self, num_sequences: int, tenant: str = "") -> "PlacesTaken":
        """Take so many places at once. Raises `QueueFullError`."""
        if self._num_taken[tenant] + num_sequences > self._limit_per_tenant:
            raise QueueFullError(num_sequences, self._num_taken[tenant], self._limit_per_tenant)
        if self.num_taken + num_sequences > self._limit:
            raise QueueFullError(num_sequences, self.num_taken, self._limit)
        self._num_taken[tenant] += num_sequences
        self.all_free.clear()
        return PlacesTaken(self, num_sequences, tenant)

    def give_back(self, num_sequences: int, tenant: str) -> None:
        self._num_taken[tenant] -= num_sequences
        if self._num_taken[tenant] == 0:
            del self._num_taken[tenant]
        if not self._num_taken:
            self.all_free.set()


class PlacesTaken:
    """A ticket: gives its places back once, at the latest when its `with` block ends."""

    def __init__(self, places: Places, num_sequences: int, tenant: str) -> None:
        self._places = places
        self._num_sequences = num_sequences
        self._tenant = tenant

    def release(self) -> None:
        """Give the places back. A second call does nothing."""
        self._places.give_back(self._num_sequences, self._tenant)
        self._num_sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

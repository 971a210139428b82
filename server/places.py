"""How many sequences may be in the server at once: those in slots, those that wait, and those whose prompt is being rendered.

A place is counted once, from before any work is done for its sequence until its end, so that a burst cannot slip through between the check
and the count. It knows nothing of requests.
"""

import asyncio
from types import TracebackType
from typing import Self

from server.client import QueueFullError


class Places:
    """A number of places, taken and given back on one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_taken = 0
        self.all_free = asyncio.Event()
        self.all_free.set()

    def take(self, num_sequences: int) -> "PlacesTaken":
        """Take so many places at once. Raises `QueueFullError`."""
        if self.num_taken + num_sequences > self._limit:
            raise QueueFullError(num_sequences, self.num_taken, self._limit)
        self.num_taken += num_sequences
        self.all_free.clear()
        return PlacesTaken(self, num_sequences)

    def give_back(self, num_sequences: int) -> None:
        self.num_taken -= num_sequences
        if self.num_taken == 0:
            self.all_free.set()


class PlacesTaken:
    """A ticket: gives its places back once, at the latest when its `with` block ends."""

    def __init__(self, places: Places, num_sequences: int) -> None:
        self._places = places
        self._num_sequences = num_sequences

    def release(self) -> None:
        """Give the places back. A second call does nothing."""
        self._places.give_back(self._num_sequences)
        self._num_sequences = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

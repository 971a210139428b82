"""Responses that were asked to be kept, in memory and bounded: by their number, by the bytes of their JSON, and by their age.

What is kept for one API key no other can see. Where there are too many, the key that holds the most of them loses its oldest, and where
they are too large, the key that holds the most bytes: with k keys, who keeps at most a k-th of either limit loses nothing to others. It
knows no more of a response than its id and its JSON.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from server.options.settings import StorageLimits


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is the response, `input_items` all that stood before its output, earlier responses included; both in JSON."""

    response_id: str
    body: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items)


class _Shelf:
    """What one key keeps, oldest first, with the times at which it goes."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self.num_bytes = 0

    def put(self, response: StoredResponse, deadline: float) -> None:
        self.take(response.response_id)
        self.responses[response.response_id] = (response, deadline)
        self.num_bytes += response.num_bytes

    def take(self, response_id: str) -> StoredResponse | None:
        found = self.responses.pop(response_id, None)
        if found is None:
            return None
        self.num_bytes -= found[0].num_bytes
        return found[0]

    def take_oldest(self) -> None:
        self.take(next(iter(self.responses)))

    def drop_expired(self, now: float) -> None:
        while self.responses and next(iter(self.responses.values()))[1] <= now:
            self.take_oldest()


class ResponseStore:
    """`now` is in seconds, of any clock that only goes forward."""

    def __init__(self, limits: StorageLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._shelves: dict[str, _Shelf] = {}

    @property
    def num_responses(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep a response, unless it alone is more than may be kept, or all that its owner keeps once others have had their share.

        Returns whether it is kept.
        """
        self._drop_expired()
        if response.num_bytes > self._limits.max_bytes or self._limits.max_responses == 0:
            return False
        self._shelves.setdefault(owner, _Shelf()).put(response, self._now() + self._limits.ttl)
        while self.num_responses > self._limits.max_responses:
            max(self._shelves.values(), key=lambda shelf: len(shelf.responses)).take_oldest()
        while self.num_bytes > self._limits.max_bytes:
            max(self._shelves.values(), key=lambda shelf: shelf.num_bytes).take_oldest()
        self._drop_empty()
        return owner in self._shelves and response.response_id in self._shelves[owner].responses

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return what is kept for this owner under this id."""
        self._drop_expired()
        found = self._shelves[owner].responses.get(response_id) if owner in self._shelves else None
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Return whether there was something to delete."""
        self._drop_expired()
        was_there = owner in self._shelves and self._shelves[owner].take(response_id) is not None
        self._drop_empty()
        return was_there

    def _drop_expired(self) -> None:
        now = self._now()
        for shelf in self._shelves.values():
            shelf.drop_expired(now)
        self._drop_empty()

    def _drop_empty(self) -> None:
        for owner in [owner for owner, shelf in self._shelves.items() if not shelf.responses]:
            del self._shelves[owner]

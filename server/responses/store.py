"""Stored responses, in memory. Their number, the bytes of their JSON and their age are limited.

An API key sees its own responses only. Above a limit, the key that has most of it loses its oldest response.
With k keys, a key that uses at most a k-th of each limit therefore loses nothing to the others.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from server.options.settings import StorageLimits


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The JSON of a response. `input_items` are all items before its output, earlier responses included."""

    response_id: str
    body: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items)


class _OwnerResponses:
    """The responses of one key with their deadlines, oldest first."""

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
    """`now` returns the seconds of a monotonic clock."""

    def __init__(self, limits: StorageLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._owners: dict[str, _OwnerResponses] = {}

    @property
    def num_responses(self) -> int:
        return sum(len(owned.responses) for owned in self._owners.values())

    @property
    def num_bytes(self) -> int:
        return sum(owned.num_bytes for owned in self._owners.values())

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Store a response, and return whether it is stored.

        It is not if it alone is above a limit, or above its owner's share of a full store.
        """
        self._drop_expired()
        if response.num_bytes > self._limits.max_bytes or self._limits.max_responses == 0:
            return False
        self._owners.setdefault(owner, _OwnerResponses()).put(response, self._now() + self._limits.ttl)
        while self.num_responses > self._limits.max_responses:
            max(self._owners.values(), key=lambda owned: len(owned.responses)).take_oldest()
        while self.num_bytes > self._limits.max_bytes:
            max(self._owners.values(), key=lambda owned: owned.num_bytes).take_oldest()
        self._drop_empty()
        return owner in self._owners and response.response_id in self._owners[owner].responses

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response with this id, or None."""
        self._drop_expired()
        found = self._owners[owner].responses.get(response_id) if owner in self._owners else None
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response, and return whether there was one."""
        self._drop_expired()
        was_there = owner in self._owners and self._owners[owner].take(response_id) is not None
        self._drop_empty()
        return was_there

    def _drop_expired(self) -> None:
        now = self._now()
        for owned in self._owners.values():
            owned.drop_expired(now)
        self._drop_empty()

    def _drop_empty(self) -> None:
        for owner in [owner for owner, owned in self._owners.items() if not owned.responses]:
            del self._owners[owner]

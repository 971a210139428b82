"""The state of one replica, in memory.

The number of stored responses, the bytes of their JSON and their age are limited. Above a limit, the key that
has most of it loses its oldest response. With k keys, a key that uses at most a k-th of each limit therefore
loses nothing to the others.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from server.options.settings import StorageLimits
from server.state.interface import RunningResponse, StoredResponse

ROUNDING = 1e-6  # the rounding of sums must not decide


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


class MemoryResponses:
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

    async def put(self, owner: str, response: StoredResponse) -> bool:
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

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        found = self._owners[owner].responses.get(response_id) if owner in self._owners else None
        return None if found is None else found[0]

    async def delete(self, owner: str, response_id: str) -> bool:
        self._drop_expired()
        was_there = owner in self._owners and self._owners[owner].take(response_id) is not None
        self._drop_empty()
        return was_there

    # There are no other replicas.

    async def announce(self, _owner: str, _response_id: str, _body: bytes | None, /) -> bool:
        return True

    async def withdraw(self, _owner: str, _response_id: str, /) -> None: ...

    async def running(self, _owner: str, _response_id: str, /) -> RunningResponse | None:
        return None

    async def cancel(self, _owner: str, _response_id: str, /) -> None: ...

    def _drop_expired(self) -> None:
        now = self._now()
        for owned in self._owners.values():
            owned.drop_expired(now)
        self._drop_empty()

    def _drop_empty(self) -> None:
        for owner in [owner for owner, owned in self._owners.items() if not owned.responses]:
            del self._owners[owner]


class MemoryBuckets:
    """`now` returns the seconds of a monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}  # and the time of each

    async def take(self, name: str, limit: int, amount: int) -> tuple[float, bool]:
        level = self._level(name, limit)
        if amount > level + ROUNDING:
            return level, False
        self._levels[name] = (level - amount, self._now())
        return level - amount, True

    def settle(self, name: str, limit: int, amount: int) -> None:
        self._levels[name] = (min(limit, self._level(name, limit) - amount), self._now())

    def _level(self, name: str, limit: int) -> float:
        now = self._now()
        level, since = self._levels.get(name, (float(limit), now))
        return min(limit, level + (now - since) * limit / 60)


class MemoryState:
    def __init__(self, limits: StorageLimits) -> None:
        self.buckets = MemoryBuckets()
        self.responses = MemoryResponses(limits)
        self.served = None

    async def close(self) -> None: ...

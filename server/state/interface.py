"""What a request must find at every replica: its key's rate limits and turns, and stored responses.

`MemoryState` has them in this process, and `SqliteState` has its stored responses in a file. `RedisState` has
them where several replicas share them. A call raises `StateError` if the state cannot be used, unless it says
otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class StateError(Exception):
    """The shared state cannot be used: Redis cannot be reached, or the file cannot be read or written."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The JSON of a response. `input_items` are all items before its output, earlier responses included."""

    response_id: str
    body: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items)


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """The JSON of a response that another replica makes, as it was when its status last changed."""

    body: bytes
    is_alive: bool  # the replica still works on it


class Responses(Protocol):
    """Responses by owner and id. An owner cannot reach another's."""

    @property
    def num_responses(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    async def put(self, owner: str, response: StoredResponse) -> bool:
        """Store a response, and return whether it is stored. Raises nothing.

        It is not if it alone is above a limit, or above its owner's share of a full store.
        """
        ...

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response with this id, or None."""
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response, and return whether there was one."""
        ...

    # Unfinished responses, for the other replicas

    async def announce(self, owner: str, response_id: str, body: bytes | None) -> bool:
        """Show a response that this replica makes, or, without a body, that it still does.

        Returns False if its owner cancelled it. To be repeated every `ANNOUNCE_INTERVAL` seconds; the replica
        counts as dead after `LEASE`.
        """
        ...

    async def withdraw(self, owner: str, response_id: str) -> None:
        """Show it no longer. Raises nothing."""
        ...

    async def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return what another replica has announced."""
        ...

    async def cancel(self, owner: str, response_id: str) -> None:
        """Let the replica that makes a response end it."""
        ...


ANNOUNCE_INTERVAL = 1.0  # seconds
LEASE = 10.0  # seconds


class Buckets(Protocol):
    """Token buckets by name. A bucket that was never used is full, and it fills by `limit` a minute."""

    async def take(self, name: str, limit: int, amount: int) -> tuple[float, bool]:
        """Take `amount`, if the level allows it. Returns the level then, and whether it was taken.

        Raises nothing: without the shared state, each replica counts alone.
        """
        ...

    def settle(self, name: str, limit: int, amount: int) -> None:
        """Take `amount` anyway, also a negative one; the level is negative after more than there was."""
        ...


class Served(Protocol):
    """The weighted tokens that all replicas have served, by tenant, for the order of their queues."""

    async def exchange(self, own: Mapping[str, int]) -> Mapping[str, int]:
        """Add what this replica has served since the last call, and return what the others have."""
        ...


EXCHANGE_INTERVAL = 1.0  # seconds


class StateObserver(Protocol):
    def lost_state(self) -> None:
        """The shared state could not be reached."""
        ...


class SharedState(Protocol):
    @property
    def buckets(self) -> Buckets: ...

    @property
    def responses(self) -> Responses: ...

    @property
    def served(self) -> Served | None:
        """None without other replicas."""
        ...

    async def close(self) -> None: ...

"""Stored responses, in memory and in Redis: limited in number, bytes and age, visible to their owner only."""

import asyncio
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from server.options.settings import StorageLimits
from server.state.interface import StoredResponse
from server.state.memory import MemoryResponses
from tests.server.state.conftest import Store

NewStore = Callable[..., Store]


class Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def response(name: str, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse(name, b"x" * (num_bytes - num_bytes // 2), b"y" * (num_bytes // 2))


def kept(store: Store, owner: str, names: str) -> str:
    return "".join(name for name in names if store.get(owner, name) is not None)


def test_the_oldest_is_evicted_first(new_store: NewStore) -> None:
    store = new_store(max_responses=3)
    for name in "abcde":
        store.put("me", response(name))
    assert kept(store, "me", "abcde") == "cde"


def test_stored_bytes_are_limited(new_store: NewStore) -> None:
    store = new_store(max_bytes=100)
    assert store.put("me", response("a", 60))
    assert not store.put("me", response("b", 101))
    assert kept(store, "me", "ab") == "a"
    store.put("me", response("c", 41))
    assert kept(store, "me", "abc") == "c"
    assert store.store.num_bytes == 41


def test_age_is_bounded(new_store: NewStore) -> None:
    store = new_store(ttl=0.2)
    store.put("me", response("a"))
    time.sleep(0.15)
    store.put("me", response("b"))
    time.sleep(0.1)
    assert kept(store, "me", "ab") == "b"
    time.sleep(0.2)
    assert kept(store, "me", "ab") == ""
    assert not store.delete("me", "b")
    assert store.store.num_bytes == 0


def test_owners_cannot_read_or_evict_others_responses(new_store: NewStore) -> None:
    store = new_store(max_responses=4)
    store.put("you", response("a"))
    for name in "bcdefgh":
        store.put("me", response(name))
    assert kept(store, "you", "abcdefgh") == "a"
    assert kept(store, "me", "abcdefgh") == "fgh"
    assert not store.delete("me", "a")
    assert store.delete("you", "a")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 100)), max_size=60))
def test_an_owner_within_its_share_loses_nothing(new_store: NewStore, puts: list[tuple[str, int]]) -> None:
    """Four keys, limits of 8 responses and 100 bytes: two responses of 25 bytes in total always stay."""
    store = new_store(max_responses=8, max_bytes=100)
    store.put("modest", response("a", 24))
    store.put("modest", response("b", 1))
    for number, (owner, num_bytes) in enumerate(puts):
        store.put(owner, response(str(number), num_bytes))
    assert kept(store, "modest", "ab") == "ab"


def test_a_single_owner_can_use_the_whole_store(new_store: NewStore) -> None:
    store = new_store(max_responses=3, max_bytes=100)
    for number in range(1, 101):
        store.put("me", response("a", number))
        store.put("me", response("b", 101 - number))
        assert kept(store, "me", "b") == "b"


def test_nothing_is_stored_with_a_limit_of_zero(new_store: NewStore) -> None:
    store = new_store(max_responses=0)
    assert not store.put("me", response("a"))
    assert store.store.num_responses == 0


STEPS = st.tuples(
    st.sampled_from(["put", "get", "delete", "wait"]),
    st.sampled_from("xyz"),
    st.sampled_from("abcd"),
    st.integers(1, 60),
)


def take(store: Store, clock: Clock, action: str, owner: str, name: str, number: int) -> None:
    """Take one of the steps, and check what it returns."""
    match action:
        case "put":
            is_kept = store.put(owner, response(name, number))
            assert store.get(owner, name) == (response(name, number) if is_kept else None)
        case "get":
            store.get(owner, name)
        case "delete":
            store.delete(owner, name)
            assert store.get(owner, name) is None
        case "wait":
            clock.seconds += number


def check_limits(store: Store) -> None:
    """Check the counts against what is found, and both against the limits of 4 responses and 100 bytes."""
    found = [stored for owner in "xyz" for name in "abcd" if (stored := store.get(owner, name)) is not None]
    counts = (len(found), sum(stored.num_bytes for stored in found))
    assert (store.store.num_responses, store.store.num_bytes) == counts
    assert counts[0] <= 4
    assert counts[1] <= 100


@settings(max_examples=50, deadline=None)
@given(st.lists(STEPS))
def test_limits_hold_for_any_operations(new_store: NewStore, steps: list[tuple[str, str, str, int]]) -> None:
    store = new_store(max_responses=4, max_bytes=100)
    for step in steps:
        take(store, Clock(), *step)  # time passes in memory only: Redis has its own
        check_limits(store)


@given(st.lists(STEPS))
def test_limits_and_counts_hold_while_time_passes(steps: list[tuple[str, str, str, int]]) -> None:
    clock = Clock()
    memory = MemoryResponses(StorageLimits(max_responses=4, max_bytes=100, ttl=50), clock.now)
    with asyncio.Runner() as runner:
        store = Store(runner, memory)
        for step in steps:
            take(store, clock, *step)
            check_limits(store)

"""The pool against a plain set of free numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.pool import SlotPool


def test_the_lowest_free_slot_is_given() -> None:
    pool = SlotPool(3)
    assert [pool.acquire("a"), pool.acquire("b"), pool.acquire("a")] == [0, 1, 2]
    pool.release(1)
    pool.release(0)
    assert pool.acquire("c") == 0
    assert [pool.holder(slot) for slot in range(3)] == ["c", None, "a"]
    assert (pool.num_free, pool.num_used) == (1, 2)


def test_what_is_not_there_is_refused() -> None:
    pool = SlotPool(1)
    with pytest.raises(RuntimeError, match="slot 0 was released"):
        pool.release(0)
    pool.acquire("a")
    with pytest.raises(RuntimeError, match="b asked for a slot, but all 1 are held"):
        pool.acquire("b")
    for slot in (-1, 1):
        with pytest.raises(IndexError):
            pool.holder(slot)
        with pytest.raises(IndexError):
            pool.release(slot)
    with pytest.raises(ValueError, match="got -1"):
        SlotPool(-1)


@given(st.integers(0, 5), st.lists(st.integers(0, 9)))
def test_any_order_of_acquiring_and_releasing(num_slots: int, choices: list[int]) -> None:
    pool, held = SlotPool(num_slots), dict[int, str]()
    for step, choice in enumerate(choices):
        free = set(range(num_slots)) - set(held)
        if choice % 2 and held:
            slot = sorted(held)[choice % len(held)]
            pool.release(slot)
            del held[slot]
        elif free:
            assert pool.acquire(f"request {step}") == min(free)
            held[min(free)] = f"request {step}"
        pool.check_integrity()
        assert (pool.num_free, pool.num_used) == (num_slots - len(held), len(held))
        assert {slot: pool.holder(slot) for slot in range(num_slots) if pool.holder(slot) is not None} == held


def test_broken_books_are_noticed() -> None:
    for spoil in ("lost", "listed twice", "free and held"):
        pool = SlotPool(3)
        pool.acquire("a")
        pool._free = {"lost": [2], "listed twice": [1, 1, 2], "free and held": [0, 1, 2]}[spoil]
        with pytest.raises(AssertionError, match="without a holder are \\[1, 2\\]"):
            pool.check_integrity()

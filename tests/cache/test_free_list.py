"""The free list against a plain set of free numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.free_list import FreeList


def test_the_lowest_free_index_is_taken() -> None:
    slots = FreeList(3)
    assert [slots.acquire("a"), slots.acquire("b"), slots.acquire("a")] == [0, 1, 2]
    slots.release(1)
    slots.release(0)
    assert slots.acquire("c") == 0
    assert [slots.holder(index) for index in range(3)] == ["c", None, "a"]
    assert (slots.num_free, slots.num_used) == (1, 2)


def test_impossible_calls_are_refused() -> None:
    slots = FreeList(1)
    with pytest.raises(RuntimeError, match="index 0 was released, but it is free"):
        slots.release(0)
    slots.acquire("a")
    with pytest.raises(RuntimeError, match="b cannot acquire an index: all 1 are held"):
        slots.acquire("b")
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"got {index}"):
            slots.holder(index)
        with pytest.raises(IndexError, match=f"got {index}"):
            slots.release(index)
    with pytest.raises(ValueError, match="got -1"):
        FreeList(-1)


@given(st.integers(0, 5), st.lists(st.integers(0, 9)))
def test_any_order_of_acquiring_and_releasing(size: int, choices: list[int]) -> None:
    slots = FreeList(size)
    held: dict[int, str] = {}
    for step, choice in enumerate(choices):
        free = set(range(size)) - set(held)
        if choice % 2 and held:
            index = sorted(held)[choice % len(held)]
            slots.release(index)
            del held[index]
        elif free:
            assert slots.acquire(f"request {step}") == min(free)
            held[min(free)] = f"request {step}"
        slots.check_integrity()
        assert (slots.num_free, slots.num_used) == (size - len(held), len(held))
        assert {
            index: slots.holder(index) for index in range(size) if slots.holder(index) is not None
        } == held


def test_broken_books_are_noticed() -> None:
    for spoil in ("lost", "listed twice", "free and held"):
        slots = FreeList(3)
        slots.acquire("a")
        slots._free = {"lost": [2], "listed twice": [1, 1, 2], "free and held": [0, 1, 2]}[spoil]
        with pytest.raises(AssertionError, match="without a holder are \\[1, 2\\]"):
            slots.check_integrity()

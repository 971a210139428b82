"""The arithmetic of a scratch against a scratch that is filled token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.scratch import ScratchLayout


@st.composite
def layouts(draw: st.DrawFn) -> ScratchLayout:
    max_tokens = draw(st.integers(2, 30))
    eviction_size = draw(st.integers(1, max_tokens - 1))
    return ScratchLayout(max_tokens, eviction_size, draw(st.integers(0, eviction_size)))


@given(layouts(), st.integers(1, 200))
def test_a_scratch_filled_token_by_token(layout: ScratchLayout, length: int) -> None:
    """It never overflows, it is as full before each eviction as at the end, and chunks end where it is
    full.
    """
    num_held = 0
    evictions: list[int] = []
    for index in range(length):
        if index > 0 and index == layout.round_end(index - 1, length):
            assert num_held == layout.num_held(length)
            assert length - index >= layout.num_ahead  # the tokens read ahead have not been read
            evictions.append(layout.num_evicted(index, length) - layout.num_evicted(index - 1, length))
            num_held -= evictions[-1]
        assert layout.num_evicted(index, length) == sum(evictions) == index - num_held
        assert index < layout.round_end(index, length) <= length
        num_held += 1
        assert num_held <= layout.max_tokens
    assert num_held == layout.num_held(length)
    assert sum(evictions) == length - num_held
    assert all(0 < size <= layout.eviction_size for size in evictions[:1])
    assert all(size == layout.eviction_size for size in evictions[1:])


@given(layouts(), st.integers(1, 200))
def test_only_prompts_that_outgrow_their_scratch_evict(layout: ScratchLayout, length: int) -> None:
    assert (layout.num_evicted(length - 1, length) == 0) == (length <= layout.max_tokens)
    if length > layout.max_tokens:
        assert layout.num_held(length) == min(layout.max_tokens, length - layout.num_ahead)


def test_without_evictions_a_longer_prompt_is_refused() -> None:
    assert ScratchLayout(8).admits(8)
    assert not ScratchLayout(8).admits(9)
    assert ScratchLayout(8, 2).admits(9)


@pytest.mark.parametrize("sizes", [(8, 8, 0), (8, 2, 3), (8, 2, -1), (8, -1, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a scratch needs"):
        ScratchLayout(*sizes)

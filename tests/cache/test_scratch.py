"""The scratch's arithmetic against a scratch that is filled token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.scratch import ScratchLayout


@st.composite
def layouts(draw: st.DrawFn) -> ScratchLayout:
    max_tokens = draw(st.integers(2, 30))
    num_dropped = draw(st.integers(1, max_tokens - 1))
    return ScratchLayout(max_tokens, num_dropped, draw(st.integers(0, num_dropped)))


@given(layouts(), st.integers(1, 200))
def test_a_scratch_filled_token_by_token(layout: ScratchLayout, length: int) -> None:
    """It never overflows, it is as full each time that something is given up as at the end, and chunks end where that happens."""
    num_held, rounds = 0, list[int]()
    for index in range(length):
        if index > 0 and index == layout.round_end(index - 1, length):
            assert num_held == layout.num_held(length)
            assert length - index >= layout.num_ahead  # the tokens read ahead have not been read
            rounds.append(layout.num_given_up(index, length) - layout.num_given_up(index - 1, length))
            num_held -= rounds[-1]
        assert layout.num_given_up(index, length) == sum(rounds) == index - num_held
        assert index < layout.round_end(index, length) <= length
        num_held += 1
        assert num_held <= layout.max_tokens
    assert num_held == layout.num_held(length)
    assert (
        sum(rounds[:1]) + len(rounds[1:]) * layout.num_dropped == length - num_held
    )  # no more rounds than must be
    assert all(0 < num_dropped <= layout.num_dropped for num_dropped in rounds[:1])
    assert all(num_dropped == layout.num_dropped for num_dropped in rounds[1:])


@given(layouts(), st.integers(1, 200))
def test_no_more_is_given_up_than_must_be(layout: ScratchLayout, length: int) -> None:
    assert (layout.num_given_up(length - 1, length) == 0) == (length <= layout.max_tokens)
    if length > layout.max_tokens:
        assert layout.num_held(length) == min(layout.max_tokens, length - layout.num_ahead)


def test_without_rounds_a_longer_prompt_is_not_read() -> None:
    assert ScratchLayout(8).admits(8)
    assert not ScratchLayout(8).admits(9)
    assert ScratchLayout(8, 2).admits(9)


@pytest.mark.parametrize("sizes", [(8, 8, 0), (8, 2, 3), (8, 2, -1), (8, -1, 0)])
def test_sizes_that_cannot_be(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a scratch needs"):
        ScratchLayout(*sizes)

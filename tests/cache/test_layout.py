"""The integer arithmetic of a slot against a slot that is filled token by token."""

import pytest
from hypothesis import assume, given, settings

from cache.layout import SlotLayout, SlotPlacement
from tests.cache.simulation import Case, SimulatedSlot, cases


def entries_of(placement: SlotPlacement, num_tokens: int, kept: list[int]) -> list[int | None]:
    """Return the token index in each entry, by the placement's arithmetic."""
    layout = placement.layout
    sinks = [index if index < num_tokens else None for index in range(layout.num_sink)]
    ring = [placement.ring_index(offset, num_tokens) for offset in range(placement.ring_size)]
    unused = [None] * (placement.kept_start - len(sinks) - len(ring))
    return [*sinks, *ring, *unused, *kept]


def check_state(placement: SlotPlacement, slot: SimulatedSlot) -> None:
    num_tokens = slot.num_written
    assert entries_of(placement, num_tokens, slot.kept) == slot.entries
    assert placement.num_live(num_tokens) == sum(token is not None for token in slot.entries)
    assert placement.is_exact(num_tokens) == slot.is_exact
    num_wraps_begun = -(-slot.num_overwritten // slot.ring_size)
    assert placement.num_ring_wraps(num_tokens) == num_wraps_begun


def check_life(case: Case) -> None:
    layout, slot = case.layout, case.simulate()
    placement = layout.place(case.num_prompt_tokens, case.prompt_window, lend_kept=case.lend_kept)
    assert placement.ring_size == slot.ring_size
    assert placement.num_kept_used == len(slot.kept)
    check_state(placement, slot)
    for _ in range(case.num_steps):
        assert placement.entry(slot.num_written) == slot.write()
        check_state(placement, slot)


@given(cases())
@settings(deadline=None)
def test_every_entry_of_a_life_is_as_simulated(case: Case) -> None:
    check_life(case)


@pytest.mark.parametrize("lend_kept", [False, True])
@pytest.mark.parametrize("prompt_window", [1, 3, 5])
@pytest.mark.parametrize("sizes", [(0, 5, 0), (0, 5, 4), (2, 5, 0), (2, 5, 4), (4, 5, 1)])
def test_every_prompt_length_across_the_boundaries(
    sizes: tuple[int, int, int], prompt_window: int, lend_kept: bool
) -> None:
    layout = SlotLayout(*sizes)
    for num_prompt_tokens in range(1, layout.capacity + 8):
        check_life(Case(layout, prompt_window, num_prompt_tokens, lend_kept))


@given(cases())
@settings(deadline=None)
def test_a_prompt_that_fits_is_written_to_the_entries_that_packing_would_choose(case: Case) -> None:
    assume(case.fits)
    placement = case.layout.place(case.num_prompt_tokens, case.prompt_window, lend_kept=case.lend_kept)
    entries = case.simulate().entries
    for token in range(case.num_prompt_tokens):
        assert entries[placement.direct_entry(token)] == token


@given(cases())
@settings(deadline=None)
def test_a_prompt_fits_as_long_as_it_is_no_longer_than_sinks_window_and_kept_entries(case: Case) -> None:
    limit = case.layout.num_sink + case.prompt_window + case.layout.num_kept
    assert case.fits == (case.num_prompt_tokens <= limit)


def test_worked_ring_example_of_the_paper() -> None:
    """SnapStream, figure 4: one sink, a ring of four, the prompt's last token at index 26."""
    placement = SlotLayout(1, 4, 0).place(27, prompt_window=4)
    assert [placement.ring_index(offset, 27) for offset in range(4)] == [25, 26, 23, 24]
    assert placement.entry(27) == placement.entry(23)
    assert [placement.ring_index(offset, 28) for offset in range(4)] == [25, 26, 27, 24]


def test_a_short_prompt_with_a_long_answer_leaves_kept_entries_empty_unless_they_are_lent() -> None:
    layout = SlotLayout(num_sink=2, num_recent=6, num_kept=4)
    own, lent = (layout.place(3, prompt_window=6, lend_kept=lend_kept) for lend_kept in (False, True))
    assert (own.ring_size, own.num_live(100)) == (6, 8)
    assert (lent.ring_size, lent.num_live(100)) == (10, 12)
    assert own.is_exact(8)
    assert not own.is_exact(9)
    assert lent.is_exact(12)
    assert not lent.is_exact(13)


def test_only_a_prompt_that_does_not_fit_borrows_from_the_ring() -> None:
    layout = SlotLayout(num_sink=2, num_recent=6, num_kept=4)
    fitting, longer = (layout.place(length, prompt_window=6, num_lent=3) for length in (12, 13))
    assert (fitting.num_lent, fitting.candidates_end) == (0, 6)
    assert (longer.num_lent, longer.window_start, longer.candidates_end) == (3, 7, 10)
    assert longer.num_live(13) == layout.capacity
    lent_entries = [longer.entry(7 + offset) for offset in range(3)]
    assert [longer.entry(13 + step) for step in range(3)] == lent_entries, (
        "decode overwrites lent entries first"
    )


@pytest.mark.parametrize("sizes", [(-1, 4, 0), (0, 0, 0), (0, 4, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {sizes[0]}, {sizes[1]} and {sizes[2]}"):
        SlotLayout(*sizes)

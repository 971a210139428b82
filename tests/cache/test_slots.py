"""The slot arithmetic over tensors against that over integers and the simulated slot; planes against
loops.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.layout import SlotLayout, SlotPlacement
from cache.pool_options import KVCacheDtype
from cache.quantization import dequantize, quantize
from cache.slots import PlaneSpec, SlotCache, decode_entries, direct_entries, direct_index, live_mask
from tests.cache.simulation import Case, cases, layouts

NUM_KV_HEADS = 2
PLANES = (PlaneSpec("key", 3, torch.float32), PlaneSpec("value", 2, torch.float64))


def place(case: Case) -> SlotPlacement:
    return case.layout.place(case.num_prompt_tokens, case.prompt_window, lend_kept=case.lend_kept)


def lengths(placements: Sequence[SlotPlacement]) -> tuple[Tensor, Tensor]:
    """Return window starts and ring sizes, [row]."""
    return torch.tensor([p.window_start for p in placements]), torch.tensor([p.ring_size for p in placements])


@st.composite
def batches(draw: st.DrawFn) -> list[Case]:
    """Prompts of different lengths in slots of one layout."""
    layout = draw(layouts())
    return draw(st.lists(cases(layout), min_size=1, max_size=4))


@given(batches())
@settings(deadline=None)
def test_decode_entries_and_live_mask_of_whole_lives(batch: list[Case]) -> None:
    layout, slots, placements = (
        batch[0].layout,
        [case.simulate() for case in batch],
        [place(case) for case in batch],
    )
    starts, ring_sizes = lengths(placements)
    for _ in range(batch[0].num_steps):
        num_tokens = torch.tensor([slot.num_written for slot in slots])
        mask = live_mask(layout, num_tokens, starts, ring_sizes)
        assert mask.tolist() == [[token is not None for token in slot.entries] for slot in slots]
        assert mask.sum(1).tolist() == [
            p.num_live(slot.num_written) for p, slot in zip(placements, slots, strict=True)
        ]
        entries = decode_entries(layout, num_tokens, ring_sizes)
        assert entries.tolist() == [
            p.entry(slot.num_written) for p, slot in zip(placements, slots, strict=True)
        ]
        assert entries.tolist() == [slot.write() for slot in slots]


@given(batches(), st.integers(0, 40))
@settings(deadline=None)
def test_direct_entries_and_direct_index_of_every_chunk(batch: list[Case], num_read: int) -> None:
    batch = [case for case in batch if case.fits]
    assume(batch)
    layout, placements = batch[0].layout, [place(case) for case in batch]
    starts, ring_sizes = lengths(placements)
    num_tokens = torch.tensor([min(num_read, case.num_prompt_tokens) for case in batch])
    held = [
        [t if t is not None and t < read else -1 for t in case.simulate().entries]
        for case, read in zip(batch, num_tokens, strict=True)
    ]
    assert direct_index(layout, num_tokens, starts, ring_sizes).tolist() == held
    for row, case in enumerate(batch):
        index = torch.arange(case.num_prompt_tokens)[None]
        entries = direct_entries(layout, index, starts[row, None, None], ring_sizes[row, None, None])
        assert entries.tolist() == [
            [placements[row].direct_entry(token) for token in range(case.num_prompt_tokens)]
        ]
        assert [case.simulate().entries[entry] for entry in entries[0]] == list(range(case.num_prompt_tokens))


@pytest.mark.parametrize("window_start", [0, 2])
def test_an_idle_row_has_no_live_entry(window_start: int) -> None:
    layout = SlotLayout(2, 4, 3)
    arguments = torch.tensor([0]), torch.tensor([window_start]), torch.tensor([4])
    assert not live_mask(layout, *arguments).any()
    assert direct_index(layout, *arguments).eq(-1).all()


def test_one_static_graph_serves_every_length() -> None:
    """The step compiles as a whole, and once for all lengths of the rows."""
    layout, graphs = SlotLayout(2, 4, 3), list[torch.fx.GraphModule]()
    cache = SlotCache(layout, 3, NUM_KV_HEADS, PLANES, "cpu")

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def step(
        slots: Tensor, num_tokens: Tensor, starts: Tensor, ring_sizes: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        cache.write(slots, decode_entries(layout, num_tokens[:, None], ring_sizes[:, None]), (key, value))
        direct = direct_entries(layout, num_tokens[:, None], starts[:, None], ring_sizes[:, None])
        index = direct_index(layout, num_tokens, starts, ring_sizes)
        return (
            direct,
            index,
            live_mask(layout, num_tokens + 1, starts, ring_sizes),
            cache.planes[0][:, :, : layout.capacity].sum(),
        )

    for num_prompt_tokens in (1, 6, 7, 9, 30):
        starts, ring_sizes = lengths([layout.place(num_prompt_tokens + row, 4) for row in range(3)])
        num_tokens = num_prompt_tokens + torch.arange(3)
        outputs = step(
            torch.arange(3),
            num_tokens,
            starts,
            ring_sizes,
            *(torch.ones(3, NUM_KV_HEADS, 1, p.width, dtype=p.dtype) for p in PLANES),
        )
        assert outputs[2].tolist() == live_mask(layout, num_tokens + 1, starts, ring_sizes).tolist()
    assert len(graphs) == 1


def sources(length: int, num_valid: int, seed: int) -> list[Tensor]:
    """Return the planes of a prompt's scratch, NaN where nothing was written."""
    generator = torch.Generator().manual_seed(seed)
    planes = [
        torch.randn(NUM_KV_HEADS, length, plane.width, dtype=plane.dtype, generator=generator)
        for plane in PLANES
    ]
    for plane in planes:
        plane[:, num_valid:] = torch.nan
    return planes


def filled_cache(layout: SlotLayout, num_slots: int) -> SlotCache:
    """Return a cache in which all entries, spare ones too, have different values."""
    cache = SlotCache(layout, num_slots, NUM_KV_HEADS, PLANES, "cpu")
    for plane in cache.planes:
        plane.copy_(-1 - torch.arange(plane.numel(), dtype=plane.dtype).view(plane.shape))
    return cache


def snapshot(cache: SlotCache) -> list[Tensor]:
    return [plane.clone() for plane in cache.planes]


def check_slot(
    cache: SlotCache,
    slot: int,
    before: Sequence[Tensor],
    tokens: Sequence[Sequence[int | None]],
    values: Sequence[Tensor],
) -> None:
    """Assert that a slot holds `tokens[kv_head][entry]`, and is otherwise as before, in its spare entry
    too.
    """
    for plane, old, value in zip(cache.planes, before, values, strict=True):
        for head in range(NUM_KV_HEADS):
            for entry, token in enumerate([*tokens[head], None]):
                expected = old[slot, head, entry] if token is None else value[head, token]
                assert plane[slot, head, entry].tolist() == expected.tolist()


@given(cases(), st.data())
@settings(deadline=None)
def test_packing_and_decoding_fill_a_slot_as_simulated(case: Case, data: st.DataObject) -> None:
    layout, candidates = case.layout, case.simulate().candidates
    num_kept = min(len(candidates), layout.num_kept)
    kept = [sorted(data.draw(st.permutations(candidates))[:num_kept]) for _ in range(NUM_KV_HEADS)]
    slots = [case.simulate(kept[head]) for head in range(NUM_KV_HEADS)]
    values = sources(case.num_prompt_tokens + case.num_steps, case.num_prompt_tokens, seed=0)
    cache = filled_cache(layout, num_slots=3)
    before = snapshot(cache)
    placement = place(case)
    cache.pack(
        1,
        values,
        placement,
        case.num_prompt_tokens,
        torch.tensor(kept, dtype=torch.int64).view(NUM_KV_HEADS, num_kept),
    )
    assert cache.kept_index[1, :, :num_kept].tolist() == kept
    check_slot(cache, 1, before, [slot.entries for slot in slots], values)
    answer = sources(case.num_prompt_tokens + case.num_steps, case.num_prompt_tokens + case.num_steps, seed=1)
    for value, decoded in zip(values, answer, strict=True):
        value[:, case.num_prompt_tokens :] = decoded[:, case.num_prompt_tokens :]
    for index in range(case.num_prompt_tokens, case.num_prompt_tokens + case.num_steps):
        entries = decode_entries(layout, torch.tensor([[index]]), placement.ring_size)
        cache.write(torch.tensor([1]), entries, [value[None, :, index : index + 1] for value in values])
        for slot in slots:
            slot.write()
    check_slot(cache, 1, before, [slot.entries for slot in slots], values)
    nothing: list[list[int | None]] = [[None] * layout.capacity] * NUM_KV_HEADS
    for other in (0, 2):
        check_slot(cache, other, before, nothing, values)


@given(cases(), st.integers(1, 7))
@settings(deadline=None)
def test_a_prompt_that_fits_is_the_same_read_in_chunks_or_packed(case: Case, chunk: int) -> None:
    assume(case.fits)
    layout, placement, length = case.layout, place(case), case.num_prompt_tokens
    values = sources(length, length, seed=0)
    direct, packed = filled_cache(layout, 2), filled_cache(layout, 2)
    starts, ring_sizes = (lengths_of[:, None] for lengths_of in lengths([placement]))
    for start in range(0, length, chunk):
        index = torch.arange(start, start + chunk)[None]
        entries = torch.where(
            index < length, direct_entries(layout, index, starts, ring_sizes), direct.spare_entry
        )
        padded = [
            torch.nn.functional.pad(
                value[:, start : start + chunk], (0, 0, 0, max(start + chunk - length, 0)), value=torch.nan
            )
            for value in values
        ]
        direct.write(torch.tensor([1]), entries, [value[None] for value in padded])
    packed.pack(1, values, placement, length)
    for one, other in zip(direct.planes, packed.planes, strict=True):
        assert torch.equal(one[:, :, : layout.capacity], other[:, :, : layout.capacity])
    candidates = case.simulate().candidates
    assert packed.kept_index[1, :, : len(candidates)].tolist() == [candidates] * NUM_KV_HEADS


def test_lent_ring_entries_hold_the_next_best_until_decode_overwrites_them() -> None:
    layout, values = SlotLayout(1, 4, 2), sources(14, 14, seed=0)
    cache, placement = filled_cache(layout, 1), layout.place(12, 4, num_lent=2)
    before = snapshot(cache)
    cache.pack(0, values, placement, 12, torch.tensor([[2, 5, 7, 9], [3, 6, 9, 4]]))
    check_slot(cache, 0, before, [[0, 9, 10, 11, 7, 2, 5], [0, 4, 10, 11, 9, 3, 6]], values)
    assert cache.kept_index[0].tolist() == [[2, 5], [3, 6]]
    for index, first, second in (
        (12, [0, 9, 10, 11, 12, 2, 5], [0, 4, 10, 11, 12, 3, 6]),
        (13, [0, 13, 10, 11, 12, 2, 5], [0, 13, 10, 11, 12, 3, 6]),
    ):
        entries = decode_entries(layout, torch.tensor([[index]]), placement.ring_size)
        cache.write(torch.tensor([0]), entries, [value[None, :, index : index + 1] for value in values])
        check_slot(cache, 0, before, [first, second], values)


def test_packing_more_candidates_than_kept_entries_needs_a_choice() -> None:
    layout = SlotLayout(1, 2, 2)
    with pytest.raises(AssertionError, match="3 candidates for 2 kept entries"):
        filled_cache(layout, 1).pack(0, sources(6, 6, seed=0), layout.place(6, 2), 6)


def test_packing_without_kept_entries_needs_no_choice() -> None:
    layout, values = SlotLayout(1, 2, 0), sources(6, 6, seed=0)
    cache = filled_cache(layout, 1)
    cache.pack(0, values, layout.place(6, 2), 6)
    check_slot(cache, 0, snapshot(cache), [[0, 5, 4]] * NUM_KV_HEADS, values)


def test_idle_rows_and_padding_change_only_spare_entries() -> None:
    cache = filled_cache(SlotLayout(1, 3, 1), num_slots=4)
    before = snapshot(cache)
    slots, spare = torch.tensor([2, 0, 0]), cache.spare_entry
    entries = torch.tensor([[3, spare, spare], [0, 1, spare], [spare, spare, spare]])
    values = [torch.full((3, NUM_KV_HEADS, 3, plane.width), torch.nan, dtype=plane.dtype) for plane in PLANES]
    written = [(0, 0), (1, 0), (1, 1)]  # row, token
    for plane_index, value in enumerate(values, start=1):
        for row, token in written:
            value[row, :, token] = 100 * plane_index + 10 * row + token
    cache.write(slots, entries, values)
    for plane, old, value in zip(cache.planes, before, values, strict=True):
        expected = old.clone()
        for row, token in written:
            expected[slots[row], :, entries[row, token]] = value[row, :, token]
        assert torch.equal(plane[:, :, :spare], expected[:, :, :spare])
        assert plane[:, :, spare].isnan().flatten(1).all(1).tolist() == [True, False, True, False]


def test_copies_are_equal_and_independent() -> None:
    layout = SlotLayout(1, 2, 2)
    cache = filled_cache(layout, num_slots=4)
    before = snapshot(cache)
    cache.pack(2, sources(9, 9, seed=0), layout.place(9, 2), 9, torch.tensor([[1, 4], [2, 6]]))
    packed = snapshot(cache)
    cache.copy(2, (0, 3))
    cache.write(
        torch.tensor([2]),
        torch.tensor([[0]]),
        [torch.zeros(1, NUM_KV_HEADS, 1, plane.width, dtype=plane.dtype) for plane in PLANES],
    )
    for plane, old, full in zip(cache.planes, before, packed, strict=True):
        assert torch.equal(plane[0], full[2])
        assert torch.equal(plane[3], full[2])
        assert torch.equal(plane[1], old[1])
        assert plane[2, :, 0].eq(0).all()
    assert cache.kept_index.tolist() == [
        [[1, 4], [2, 6]],
        [[0, 0], [0, 0]],
        [[1, 4], [2, 6]],
        [[1, 4], [2, 6]],
    ]


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_slots_in_8_bits_hold_the_codes_of_what_is_written_packed_and_copied(kind: KVCacheDtype) -> None:
    layout = SlotLayout(1, 4, 2)
    exact = SlotCache(layout, 3, NUM_KV_HEADS, PLANES, "cpu")
    rounded = SlotCache(layout, 3, NUM_KV_HEADS, PLANES, "cpu", kv_cache_dtype=kind)
    values = sources(14, 14, seed=0)
    for cache in (exact, rounded):
        cache.pack(0, values, layout.place(12, 4), 12, torch.tensor([[2, 5], [3, 6]]))
        for index in (12, 13):
            entries = decode_entries(layout, torch.tensor([[index]]), torch.tensor([[4]]))
            cache.write(torch.tensor([0]), entries, [value[None, :, index : index + 1] for value in values])
        cache.copy(0, [2])
    assert torch.equal(rounded.kept_index, exact.kept_index)
    for slots in (slice(0, 3), torch.tensor([2, 0])):
        for found, expected in zip(rounded.read(slots, 7), exact.read(slots, 7), strict=True):
            assert found.dtype is expected.dtype
            assert torch.equal(found, dequantize(*quantize(expected, kind), expected.dtype, kind))


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_nan_in_spare_entries_of_8_bits_is_not_read(kind: KVCacheDtype) -> None:
    cache = SlotCache(SlotLayout(1, 3, 1), 2, NUM_KV_HEADS, PLANES, "cpu", kv_cache_dtype=kind)
    spare = torch.full((2, 1), cache.spare_entry)
    cache.write(
        torch.arange(2), spare, [torch.full((2, NUM_KV_HEADS, 1, p.width), torch.nan) for p in PLANES]
    )
    assert cache.planes[2][:, :, cache.spare_entry].isnan().all()
    assert all(not values.any() for values in cache.read(slice(0, 2), cache.spare_entry))


def test_num_bytes_in_8_bits_has_a_scale_for_each_token_and_head() -> None:
    """66 bytes of the 128 of a row of 64 values in bfloat16."""
    planes = [PlaneSpec(name, 64, torch.bfloat16) for name in ("key", "value")]
    sizes = [
        SlotCache(SlotLayout(0, 9, 0), 3, 2, planes, "cpu", kv_cache_dtype=kind).num_bytes
        for kind in KVCacheDtype
    ]
    assert sizes == [3 * 2 * 10 * 2 * row for row in (128, 66, 66)]


def test_num_bytes_is_the_memory_of_all_entries() -> None:
    cache = SlotCache(SlotLayout(1, 2, 3), 5, NUM_KV_HEADS, PLANES, "cpu")
    per_entry = 3 * 4 + 2 * 8
    assert cache.num_bytes == 5 * NUM_KV_HEADS * (7 * per_entry + 3 * 8)
    assert all(plane.eq(0).all() for plane in cache.planes)

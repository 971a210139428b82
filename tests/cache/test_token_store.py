"""The store against a list of rows that are quantised one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.layout import part_size, stored_row_bytes
from cache.low_bits import dequantize, quantize, rotate
from cache.token_store import TokenStore

NUM_SLOTS = 3
NUM_KV_HEADS = 2
WIDTHS = (64, 192)  # the second one has three parts


def expected(rows: Tensor) -> Tensor:
    parts = torch.split(rotate(rows), part_size(rows.shape[-1]), dim=-1)
    return torch.cat([dequantize(*quantize(part, 4), 4) for part in parts], dim=-1)


def expected_keys(keys: Tensor, num_filled: int) -> Tensor:
    """Return what is read of keys [kv_head, token, width], of which the first ones are the prompt's."""
    has_centre = num_filled >= 16
    centre = rotate(keys[:, :num_filled].mean(1))[:, None] if has_centre else torch.zeros(1, 1, 1)
    parts = torch.split(rotate(keys) - centre, part_size(keys.shape[-1]), dim=-1)
    return torch.cat([dequantize(*quantize(part, 4), 4) for part in parts], dim=-1) + centre


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Return rows whose rotation in 64s is exact in any order of its sums."""
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed)).float()


def all_values(store: TokenStore) -> Tensor:
    entries = torch.arange(store.num_tokens).expand(NUM_SLOTS, NUM_KV_HEADS, -1)
    return store.values(slice(None), entries)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 99))
@settings(deadline=None)
def test_a_prompt_and_the_tokens_after_it(num_tokens: int, num_filled: int, seed: int) -> None:
    num_filled = min(num_filled, num_tokens)
    keys, values = (integers(NUM_KV_HEADS, num_tokens, width, seed=seed) for width in WIDTHS)
    store = TokenStore(num_tokens, NUM_SLOTS, NUM_KV_HEADS, WIDTHS, "cpu")
    store.set_centres(1, keys[:, :num_filled])
    store.fill(1, keys[:, :num_filled], values[:, :num_filled])
    for index in range(num_filled, num_tokens):  # beside an idle row and another slot
        store.write(
            torch.tensor([0, 1, 2]),
            torch.tensor([store.spare_entry, index, index]),
            torch.stack([torch.full_like(keys[:, index], math.nan), keys[:, index], -keys[:, index]]),
            torch.stack([torch.full_like(values[:, index], math.nan), values[:, index], -values[:, index]]),
        )
    assert torch.equal(store.keys(slice(1, 2))[0], expected_keys(keys, num_filled))
    assert torch.equal(all_values(store)[1], expected(values))
    assert not store.keys(slice(0, 1)).any()
    assert not store.keys(slice(2, 3))[:, :, :num_filled].any()


def test_chosen_entries_of_several_slots() -> None:
    values = integers(NUM_SLOTS, NUM_KV_HEADS, 20, WIDTHS[1])
    store = TokenStore(20, NUM_SLOTS, NUM_KV_HEADS, WIDTHS, "cpu")
    for slot, of_slot in enumerate(values):
        store.fill(slot, torch.zeros(NUM_KV_HEADS, 20, WIDTHS[0]), of_slot)
    chosen = torch.randint(20, (2, NUM_KV_HEADS, 5))
    found = store.values(slice(1, 3), chosen)
    for row, head, place in [(0, 0, 0), (0, 1, 4), (1, 0, 2), (1, 1, 1)]:
        token = int(chosen[row, head, place])
        assert torch.equal(found[row, head, place], expected(values[row + 1, head, token]))


def test_latents_are_their_own_values() -> None:
    latents = integers(1, 40, 192)
    store = TokenStore(40, 2, 1, (192,), "cpu")
    store.set_centres(1, latents[:, :39])
    store.fill(1, latents[:, :39])
    store.write(torch.tensor([0, 1]), torch.tensor([40, 39]), torch.stack([latents[:, 0], latents[:, 39]]))
    held = expected_keys(latents, 39)
    assert torch.equal(store.keys(slice(1, 2))[0], held)
    chosen = torch.tensor([[[3, 39, 17]]])
    assert torch.equal(store.values(slice(1, 2), chosen)[0], held[:, chosen[0, 0]])


def test_what_keys_have_in_common_costs_no_precision() -> None:
    """Also in keys that come later. Values, of which few are summed, have no centre."""
    apart = integers(NUM_KV_HEADS, 40, 64)
    errors = []
    for shift in (0.0, 1000.0):
        store = TokenStore(40, 1, NUM_KV_HEADS, (64, 64), "cpu")
        keys = apart + shift
        store.set_centres(0, keys[:, :30])
        store.fill(0, keys[:, :30], keys[:, :30])
        for index in range(30, 40):
            store.write(torch.tensor([0]), torch.tensor([index]), *[keys[None, :, index]] * 2)
        errors.append(float((store.keys(slice(None))[0] - rotate(keys)).square().mean()))
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    store.clear(0)
    assert not store.keys(slice(None)).any()


@pytest.mark.parametrize(
    ("widths", "num_bytes"),
    [((64, 64), 32 + 32 + 2 + 2), ((256, 80), 128 + 40 + 8 + 2), ((576,), 288 + 18), ((288,), 144 + 18)],
)
def test_a_token_takes_half_a_byte_a_value_and_a_step_for_each_part(
    widths: tuple[int, ...], num_bytes: int
) -> None:
    store = TokenStore(4095, 1, 1, widths, "meta")
    assert sum(plane.nbytes for plane in store.planes) == 4096 * num_bytes + widths[0] * 4
    assert sum(map(stored_row_bytes, widths)) == num_bytes

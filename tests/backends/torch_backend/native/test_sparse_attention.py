"""The kernel of policy sparse against the plain version, which has the same tokens stored."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.torch_backend.model.attention import MASKED, AttentionOptions
from backends.torch_backend.model.sparse_attention import StoredTokens
from backends.torch_backend.model.sparse_attention import sparse_attention as plain_attention
from backends.torch_backend.native.kernels import kernels_are_supported, load_kernels, sparse_attention
from cache.low_bits import rotate
from cache.quantization import quantize
from cache.token_store import BLOCK, TokenStore

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

CAPACITY = 21  # and a spare entry
STORED = 700
NUM_STORED = torch.tensor([700, 1, 0, 333])  # before the step
SCALING = 0.3


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _spoil(store: TokenStore, slot: int, first: int, end: int) -> None:
    """Make the steps of some entries NaN."""
    key_steps, value_steps, _ = store.planes[2:]
    entries = torch.arange(first, end)
    key_steps[slot, :, entries // BLOCK, :, entries % BLOCK] = torch.nan
    value_steps[slot, :, first:end] = torch.nan


class Case:
    """Rows with different numbers of stored tokens. The third one is idle, and its slot is full of NaN."""

    def __init__(self, heads: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
        self.planes = [_random(4, kv_heads, CAPACITY + 1, width, dtype=dtype, seed=width) for width in widths]
        self.store = TokenStore(STORED, 4, kv_heads, widths, "cpu")
        for slot, num_stored in enumerate(NUM_STORED.tolist()):
            num_before = max(num_stored - 1, 0)
            keys, values = (_random(kv_heads, num_before, width, seed=slot) for width in widths)
            self.store.set_centres(slot, keys + 0.2)
            self.store.fill(slot, keys + 0.2, values)
            _spoil(self.store, slot, num_before, STORED + 1)
        for plane in (*self.planes, *self.store.planes[2:]):
            plane[2] = torch.nan
        self.query, self.key, self.value = (
            _random(4, 1, num_heads, width, dtype=dtype, seed=7 + width).transpose(1, 2)
            for num_heads, width in ((heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
        )
        # After the rotation, such a query is a row of integers, so that 8 bits hold it.
        integers, scales = quantize(rotate(self.query))
        self.query = rotate(integers * scales.float()).to(dtype)
        self.entries = torch.tensor([[20], [3], [CAPACITY], [9]])
        self.bias = torch.zeros(4, 1, CAPACITY)
        self.bias[2] = MASKED

    def run(self, num_attended: int, softcap: float | None, sinks: Tensor | None, rows: slice) -> Tensor:
        planes = tuple(plane[rows].clone() for plane in (*self.planes, *self.store.planes))
        self.after = planes
        return sparse_attention(
            self.query[rows],
            self.key[rows],
            self.value[rows],
            planes,
            self.entries[rows],
            self.bias[rows],
            NUM_STORED[rows],
            num_attended,
            scaling=SCALING,
            softcap=softcap,
            sinks=sinks,
        )

    def expected(self, num_attended: int, softcap: float | None, sinks: Tensor | None) -> Tensor:
        slots = torch.arange(4)
        demoted = [plane[slots, :, self.entries[:, 0]] for plane in self.planes]
        for steps in self.store.planes[2:]:  # the plain version relies on cleared slots
            steps.nan_to_num_(0)
        entries = torch.where(NUM_STORED > 0, NUM_STORED - 1, self.store.spare_entry)
        self.store.write(slots, entries, *demoted)
        for plane, new in zip(self.planes, (self.key, self.value), strict=True):
            plane[slots[:, None], :, self.entries] = new.transpose(1, 2)
        stored = StoredTokens(self.store, slice(0, 4), NUM_STORED, num_attended)
        options = AttentionOptions(SCALING, softcap, sinks)
        keys, values = (plane[:, :, :CAPACITY].float() for plane in self.planes)
        return plain_attention(self.query.float(), keys, values, self.bias, stored, options)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths"),
    [(4, 2, (16, 16)), (7, 1, (40, 24)), (6, 2, (64, 128)), (5, 5, (256, 96))],
)
@pytest.mark.parametrize(
    ("dtype", "num_attended"),
    # Rounding to bfloat16 decides between tokens of nearly equal strength: there, all are chosen.
    [(torch.float32, 40), (torch.float32, 300), (torch.float32, STORED), (torch.bfloat16, STORED)],
)
@torch.inference_mode()
def test_sparse_attention_equals_the_plain_version_and_is_batch_invariant(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    widths: tuple[int, int],
    num_attended: int,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    case = Case(heads, kv_heads, widths, dtype)
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    output = case.run(num_attended, softcap, sinks, slice(0, 4))
    kept = case.after
    alone = [case.run(num_attended, softcap, sinks, slice(row, row + 1)) for row in range(4)]
    for row, of_row in enumerate(alone):
        assert torch.equal(of_row[0], output[row])
    assert not output[2].any(), "a row that sees nothing is zero"
    expected = case.expected(num_attended, softcap, sinks)
    live = [0, 1, 3]
    tolerance = 1e-3 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(output[live].float(), expected[live], atol=tolerance, rtol=tolerance)
    for plane, expected_plane in zip(kept, (*case.planes, *case.store.planes), strict=True):
        differing = (plane[live] != expected_plane[live]) & ~plane[live].isnan()
        # Another order of the rotation's sums may move a number to the next level.
        assert float(differing.float().mean()) < 1e-4


@torch.inference_mode()
def test_tokens_that_are_not_finite_are_no_danger() -> None:
    case = Case(4, 2, (16, 16), torch.float32)
    _spoil(case.store, 0, 100, 600)
    case.query[3] = torch.nan
    output = case.run(40, None, None, slice(0, 4))
    assert output[1].isfinite().all()
    assert output[3].isnan().all()

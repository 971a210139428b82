"""Policy sparse's plain attention against that to the same rows as they are once rounded."""

import pytest
import torch
from torch import Tensor

from backends.torch_backend.model.attention import AttentionOptions, grouped_attention
from backends.torch_backend.model.sparse_attention import StoredTokens, sparse_attention
from cache.layout import part_size
from cache.low_bits import dequantize, quantize, rotate
from cache.token_store import TokenStore

NUM_STORED = (40, 7)
NUM_EXACT = 5
NUM_HEADS = 6


def rounded(rows: Tensor) -> Tensor:
    parts = torch.split(rotate(rows), part_size(rows.shape[-1]), dim=-1)
    return rotate(torch.cat([dequantize(*quantize(part, 4), 4) for part in parts], dim=-1))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("kv_heads", "widths", "value_width"),
    [(2, (16, 24), 24), (3, (128, 64), 64), (1, (96,), 64), (1, (40,), 32)],  # the last two are latents
)
def test_tokens_take_part_as_they_are_once_rounded(
    kv_heads: int, widths: tuple[int, ...], value_width: int, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    store = TokenStore(max(NUM_STORED), 2, kv_heads, widths, "cpu")
    stored = [random(2, kv_heads, max(NUM_STORED), width) for width in widths]
    for slot, num_tokens in enumerate(NUM_STORED):
        store.set_centres(slot, stored[0][slot])
        store.fill(slot, *(rows[slot, :, :num_tokens] for rows in stored))
    exact = [random(2, kv_heads, NUM_EXACT, width) for width in widths]
    query = random(2, NUM_HEADS, 1, widths[0])
    options = AttentionOptions(0.2, softcap)
    output = sparse_attention(
        query,
        exact[0],
        exact[-1][..., :value_width],
        torch.zeros(2, 1, NUM_EXACT),
        StoredTokens(store, slice(0, 2), torch.tensor(NUM_STORED), max(NUM_STORED)),
        options,
    )
    for row, num_tokens in enumerate(NUM_STORED):
        centre = stored[0][row].mean(1, keepdim=True)
        held = [
            torch.cat([rounded(old[row, :, :num_tokens] - offset) + offset, new[row]], dim=1)
            for offset, old, new in zip((centre, torch.zeros(1)), stored, exact, strict=False)
        ]
        expected = grouped_attention(
            query[row, None],
            held[0][None],
            held[-1][None, ..., :value_width],
            torch.zeros(1, 1, num_tokens + NUM_EXACT),
            scaling=0.2,
            softcap=softcap,
        )
        torch.testing.assert_close(output[row, None], expected, atol=1e-5, rtol=1e-4)

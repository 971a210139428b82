"""The kernels against the same products in float64, and rows that do not depend on their company."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends.torch_backend.attention import HIDDEN, grouped_attention
from backends.torch_backend.kernels import (
    MAX_ROWS,
    Kernels,
    kernels_are_supported,
    load_kernels,
    packed_linear,
    prompt_attention,
    slot_attention,
    takes_prompt,
)
from backends.torch_backend.linear import ReorderedLinear

pytestmark = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX-512 with bfloat16")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", autouse=True)
def kernels(built_kernels: Path) -> None:
    load_kernels(built_kernels)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64), (96, 100), (160, 40), (32, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_linear(dtype: torch.dtype, sizes: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, bias=has_bias, dtype=dtype)
    reordered = ReorderedLinear([layer], Kernels())
    packed = reordered.packed
    assert packed is not None, "oneDNN lays weights out as the kernel expects"
    hidden = _random(MAX_ROWS, sizes[0], dtype=dtype)
    whole = packed_linear(hidden, packed, layer.bias, sizes[1])
    expected = nn.functional.linear(hidden.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for first, last in ((0, 1), (2, 4), (3, 6), (7, 12)):
        assert torch.equal(packed_linear(hidden[first:last, None], packed, layer.bias, sizes[1])[:, 0], whole[first:last])


@torch.inference_mode()
def test_weights_that_lie_otherwise_are_left_to_onednn() -> None:
    layer = nn.Linear(33, 64)
    reordered = ReorderedLinear([layer], Kernels(are_used=True))
    assert reordered.packed is None
    hidden = _random(3, 33, dtype=torch.float32)
    torch.testing.assert_close(reordered(hidden), layer(hidden))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(4, 2, 16, 16), (7, 1, 40, 24), (6, 2, 64, 128), (5, 5, 7, 9)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, value_width: int, has_sinks: bool, softcap: float | None
) -> None:
    """Three slots of four: one with gaps, one that sees its new token alone, one idle. Where they do not look is NaN or infinity."""
    rows, capacity, read = 3, 61, 50
    keys, values = (_random(4, kv_heads, capacity, size, dtype=dtype, seed=size) for size in (width, value_width))
    query, key, value = (
        _random(rows, 1, number, size, dtype=dtype, seed=7 + size).transpose(1, 2)
        for number, size in ((heads, width), (kv_heads, width), (kv_heads, value_width))
    )
    entries = torch.tensor([[20], [3], [capacity - 1]])
    bias = torch.full((rows, 1, read), HIDDEN)
    bias[0, 0, :30] = bias[0, 0, 37:41] = bias[1, 0, 3] = 0
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    hidden = keys.clone(), values.clone()
    for plane, filler in zip(hidden, (torch.inf, torch.nan), strict=True):
        plane[0, :, 48:] = plane[1, :, 16:] = plane[2:] = filler

    output = slot_attention(query, key, value, hidden, entries, bias, scaling=0.3, softcap=softcap, sinks=sinks)

    for plane, kept, new in zip((keys, values), hidden, (key, value), strict=True):
        plane[torch.arange(rows)[:, None], :, entries] = new.transpose(1, 2)
        assert torch.equal(kept[0, :, :41], plane[0, :, :41]), "only the new tokens are written"
        assert torch.equal(kept[2, :, capacity - 1], new[2, :, 0])
    expected = grouped_attention(
        query.double(),
        keys[:rows, :, :read].double(),
        values[:rows, :, :read].double(),
        bias.double(),
        scaling=0.3,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    torch.testing.assert_close(output[:2].double(), expected[:2], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not output[2].any(), "a row that sees nothing is zero"
    for row in range(2):
        alone = slot_attention(
            query[row : row + 1],
            key[row : row + 1],
            value[row : row + 1],
            (hidden[0][row : row + 1].clone(), hidden[1][row : row + 1].clone()),
            entries[row : row + 1],
            bias[row : row + 1, :, : 41 if row == 0 else 17].contiguous(),
            scaling=0.3,
            softcap=softcap,
            sinks=sinks,
        )
        assert torch.equal(alone[0], output[row])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(4, 2, 16, 16), (7, 1, 40, 25), (6, 2, 64, 128), (2, 2, 6, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_prompt_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    sliding_window: int | None,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """Chunks at a sequence's end, at its start behind padding, and nothing but padding. Behind a row's last entry is NaN or infinity."""
    rows, tokens, read = 3, 70, 301
    keys, values = (_random(rows, kv_heads, read, size, dtype=dtype, seed=size) for size in (width, value_width))
    query = _random(rows, tokens, heads, width, dtype=dtype, seed=9).transpose(1, 2)
    last_seen = torch.stack([torch.arange(tokens) + read - tokens, torch.arange(tokens) - 20, torch.full((tokens,), -1)]).clamp(min=-1)
    sinks = _random(heads, dtype=dtype, seed=3) if has_sinks else None
    attend = partial(prompt_attention, sliding_window=sliding_window, scaling=0.3, softcap=softcap, sinks=sinks)
    hidden = keys.clone(), values.clone()
    for plane, filler in zip(hidden, (torch.inf, torch.nan), strict=True):
        plane[1, :, tokens - 20 :] = plane[2] = filler

    output = attend(query, hidden[0], hidden[1], last_seen)

    entry = torch.arange(read)
    is_seen = (entry <= last_seen[..., None]) & (entry > last_seen[..., None] - (sliding_window or read))
    expected = grouped_attention(
        query.double(),
        keys.double(),
        values.double(),
        torch.where(is_seen, 0.0, HIDDEN).double(),
        scaling=0.3,
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    is_read = last_seen >= 0
    torch.testing.assert_close(output[is_read].double(), expected[is_read], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not output[~is_read].any(), "a token that sees nothing is zero"
    for row in range(rows):
        alone = attend(*(part[row : row + 1] for part in (query, *hidden, last_seen)))
        assert torch.equal(alone[0], output[row])


def test_prompts_that_are_left_to_torch() -> None:
    assert takes_prompt(torch.empty(1, 1, 1, 6))
    assert not takes_prompt(torch.empty(1, 1, 1, 7))
    assert not takes_prompt(torch.empty(1, 1, 1, 6, dtype=torch.float16))

"""Grouped attention against torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_backend.model import attention
from backends.torch_backend.model.attention import MASKED, grouped_attention

ROWS, HEADS, KV_HEADS, QUERIES, ENTRIES, WIDTH, VALUE_WIDTH = 2, 6, 2, 40, 50, 16, 12


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, HEADS, QUERIES, WIDTH, generator=generator)
    key = torch.randn(ROWS, KV_HEADS, ENTRIES, WIDTH, generator=generator)
    value = torch.randn(ROWS, KV_HEADS, ENTRIES, VALUE_WIDTH, generator=generator)
    is_seen = torch.rand(ROWS, QUERIES, ENTRIES, generator=generator) < 0.5
    is_seen[..., 0] = True
    return query, key, value, is_seen


def _bias(is_seen: Tensor) -> Tensor:
    return torch.where(is_seen, 0.0, MASKED)


def test_equals_torch() -> None:
    query, key, value, is_seen = _inputs()
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen[:, None], scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(
        grouped_attention(query, key, value, _bias(is_seen), scaling=0.3), expected.transpose(1, 2)
    )


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, is_seen = _inputs()
    whole = grouped_attention(query, key, value, _bias(is_seen), scaling=0.3)
    monkeypatch.setattr(attention, "_MAX_SCORES_CPU", 1)
    monkeypatch.setattr(attention, "_FEWEST_QUERIES", 16)
    torch.testing.assert_close(grouped_attention(query, key, value, _bias(is_seen), scaling=0.3), whole)


def test_softcap_bounds_the_scores() -> None:
    query, key, value, is_seen = _inputs()
    repeated = key.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = 2.0 * torch.tanh(query @ repeated.mT * 0.3 / 2.0)
    weights = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(dim=-1)
    expected = (weights @ value.repeat_interleave(HEADS // KV_HEADS, dim=1)).transpose(1, 2)
    torch.testing.assert_close(
        grouped_attention(query, key, value, _bias(is_seen), scaling=0.3, softcap=2.0), expected
    )


def test_a_sink_is_an_entry_of_value_zero() -> None:
    """Torch sees the sink as one more entry, whose key gives the sink's score and whose value is 0."""
    query, key, value, is_seen = _inputs()
    sinks = torch.linspace(-2, 3, HEADS)
    one = torch.ones(ROWS, HEADS, QUERIES, 1)
    group = HEADS // KV_HEADS
    keys = torch.cat([key.repeat_interleave(group, dim=1), torch.zeros(ROWS, HEADS, 1, WIDTH)], dim=2)
    keys = torch.cat([keys, torch.zeros(ROWS, HEADS, ENTRIES + 1, 1)], dim=3)
    keys[:, :, -1, -1] = sinks / 0.3
    values = torch.cat(
        [value.repeat_interleave(group, dim=1), torch.zeros(ROWS, HEADS, 1, VALUE_WIDTH)], dim=2
    )
    mask = torch.cat([is_seen, torch.ones(ROWS, QUERIES, 1, dtype=torch.bool)], dim=2)[:, None]
    expected = scaled_dot_product_attention(
        torch.cat([query, one], dim=3), keys, values, attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    torch.testing.assert_close(
        grouped_attention(query, key, value, _bias(is_seen), scaling=0.3, sinks=sinks), expected
    )


def test_a_query_that_sees_nothing_is_finite() -> None:
    query, key, value, is_seen = _inputs()
    assert (
        grouped_attention(query, key, value, _bias(torch.zeros_like(is_seen)), scaling=0.3).isfinite().all()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_step_needs_no_bias_for_earlier_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The bias of the step's own tokens, in causal blocks, against torch's mask over all entries."""
    monkeypatch.setattr(attention, "_MAX_SCORES_CPU", 1)
    monkeypatch.setattr(attention, "_FEWEST_QUERIES", 16)
    query, key, value = (tensor.to(dtype) for tensor in _inputs()[:3])
    num_open = ENTRIES - QUERIES
    is_seen = torch.arange(ENTRIES) <= num_open + torch.arange(QUERIES)[:, None]
    expected = scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=is_seen, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    bias = _bias(is_seen[:, num_open:]).expand(ROWS, -1, -1)
    found = grouped_attention(query, key, value, bias, scaling=0.3, is_causal=True)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_entries_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """How much of a slot is read depends on a batch's longest sequence; what the others get must not."""
    generator = torch.Generator().manual_seed(1)
    plane = torch.randn(2, ROWS, KV_HEADS, 2049, WIDTH, generator=generator).to(dtype)
    query = torch.randn(ROWS, HEADS, 1, WIDTH, generator=generator).to(dtype)
    is_seen = torch.arange(2048) < torch.tensor([3, 200])[:, None, None]
    outputs = [
        grouped_attention(
            query, plane[0, :, :, :length], plane[1, :, :, :length], _bias(is_seen[..., :length]), scaling=0.3
        )
        for length in (256, 384, 512, 768, 1024, 1536, 2048)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)

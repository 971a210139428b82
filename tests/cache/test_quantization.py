"""Rows in 8 bits: the error of each element, and the rows at the ends of the range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pool_options import KVCacheDtype
from cache.quantization import dequantize, quantize


@given(st.integers(1, 130), st.floats(-30, 30), st.integers(0, 99))
@settings(deadline=None)
def test_no_element_is_off_by_more_than_half_a_scale(width: int, log2_size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, width, generator=generator) * 2**log2_size
    codes, scales = quantize(rows)
    assert codes.dtype is torch.int8
    assert codes.abs().max() <= 127
    error = (dequantize(codes, scales, torch.float32).double() - rows.double()).abs()
    assert (error <= scales.double() * (0.5 + 1e-5)).all()
    # The scale is as small as it can be, but for its rounding: 8 bits of a bfloat16's significand.
    assert (scales.double() * 127 <= rows.abs().amax(-1, keepdim=True).double() * (1 + 2**-8)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_small_integers_are_exact(dtype: torch.dtype) -> None:
    rows = torch.arange(-127, 128, dtype=dtype)[None]
    assert torch.equal(dequantize(*quantize(rows), dtype), rows)


@given(st.integers(1, 130), st.floats(-30, 30), st.integers(0, 99))
@settings(deadline=None)
def test_in_fp8_no_element_is_off_by_more_than_a_16th(width: int, log2_size: float, seed: int) -> None:
    """Of itself, or of the smallest number with all its digits."""
    generator = torch.Generator().manual_seed(seed)
    # Sizes from one to a millionth: in int8, most of the row would be 0.
    rows = torch.randn(5, width, generator=generator) * 2 ** (log2_size - torch.arange(width) % 20)
    codes, scales = quantize(rows, KVCacheDtype.FP8)
    assert codes.dtype is torch.int8
    found = dequantize(codes, scales, torch.float32, KVCacheDtype.FP8).double()
    bounds = torch.maximum(rows.double().abs(), scales.double() / 64) / 16
    assert ((found - rows.double()).abs() <= bounds * (1 + 1e-5)).all()


def test_numbers_of_fp8_are_exact() -> None:
    rows = torch.tensor([[448.0, -208.0, 0.0625, 15.0, 2**-9]])
    assert torch.equal(dequantize(*quantize(rows, KVCacheDtype.FP8), torch.float32, KVCacheDtype.FP8), rows)


@pytest.mark.parametrize("kind", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_a_row_of_zeros_stays_zero_and_one_that_is_not_finite_does_not_become_finite(
    kind: KVCacheDtype,
) -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [1e-44, 0.0, 0.0]])
    found = dequantize(*quantize(rows, kind), torch.float32, kind)
    assert not found[0].any()
    assert found[1].isnan().all()
    assert not found[2].isfinite().all()
    assert found[3].abs().max() <= 1e-37


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(4, 9)
    codes, scales = quantize(rows)
    for index in range(4):
        alone = quantize(rows[index : index + 1])
        assert torch.equal(alone[0][0], codes[index])
        assert torch.equal(alone[1][0], scales[index])

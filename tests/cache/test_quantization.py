"""Rows in 8 bits: the error of each element, and the rows at the ends of the range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.quantization import MAX_CODE, dequantize, quantize


@given(st.integers(1, 130), st.floats(-30, 30), st.integers(0, 99))
@settings(deadline=None)
def test_no_element_is_off_by_more_than_half_a_scale(width: int, log2_size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, width, generator=generator) * 2**log2_size
    codes, scales = quantize(rows)
    assert codes.dtype is torch.int8
    assert codes.abs().max() <= MAX_CODE
    error = (dequantize(codes, scales, torch.float32).double() - rows.double()).abs()
    assert (error <= scales.double() * (0.5 + 1e-5)).all()
    # The scale is as small as it can be, but for its rounding: 8 bits of a bfloat16's significand.
    assert (scales.double() * MAX_CODE <= rows.abs().amax(-1, keepdim=True).double() * (1 + 2**-8)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_small_integers_are_exact(dtype: torch.dtype) -> None:
    rows = torch.arange(-127, 128, dtype=dtype)[None]
    assert torch.equal(dequantize(*quantize(rows), dtype), rows)


def test_a_row_of_zeros_stays_zero_and_one_that_is_not_finite_does_not_become_finite() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [1e-44, 0.0, 0.0]])
    found = dequantize(*quantize(rows), torch.float32)
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

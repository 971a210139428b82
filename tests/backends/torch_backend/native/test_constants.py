"""The constants that Python and the C++ kernels share have one value."""

import re

import torch
from torch import nn

from backends.torch_backend.model.attention import MASKED
from backends.torch_backend.model.quantized_linear import QuantizedProduct, quantize
from backends.torch_backend.native.kernels import (
    BLOCK,
    GROUP,
    PADDING_BYTES,
    SOURCES,
    STEPS,
    Kernels,
    kernels_are_supported,
)
from cache import layout, token_store


def _constant(header: str, name: str) -> float:
    """Return the value of a `constexpr` number in a header."""
    found = re.search(rf"constexpr \w+ {name} = ([-\de.]+)f?( << (\d+))?;", (SOURCES / header).read_text())
    assert found is not None, f"{header} defines {name} as a number"
    return float(found[1]) * (1 << int(found[3] or 0))


def test_packed_weights_have_the_kernels_block_and_padding() -> None:
    assert _constant("tile.h", "kBlock") == BLOCK
    assert _constant("linear.h", "kMaxPadding") == PADDING_BYTES / torch.bfloat16.itemsize - 1


def test_weights_in_groups_have_the_kernels_inputs_and_steps() -> None:
    assert _constant("groups.h", "kGroup") == GROUP
    assert _constant("groups.h", "kPerZeroPoint") == STEPS


def test_quantised_weights_have_the_kernels_zero_point_and_range() -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    weight = QuantizedProduct([layer], Kernels()).weight[: layer.out_features]
    assert bool((weight == _constant("linear.h", "kZeroPoint")).all())
    largest = _constant("linear.h", "kMaxInt8")
    assert quantize(torch.tensor([[2.0, -2.0]]))[0].tolist() == [[largest, -largest]]


def test_int8_rows_are_limited_to_the_inputs_that_the_kernels_accept() -> None:
    num_inputs = int(_constant("linear.h", "kMaxInt8Inputs"))
    assert QuantizedProduct.is_packable(torch.empty(1, num_inputs)) == kernels_are_supported()
    assert not QuantizedProduct.is_packable(torch.empty(1, num_inputs + 4))


def test_stores_have_the_kernels_blocks() -> None:
    assert _constant("token_store.h", "kStoredBlock") == token_store.BLOCK
    assert _constant("token_store.h", "kStoredTogether") == token_store.STORED_TOGETHER
    assert _constant("token_store.h", "kCodes") == 1 << layout.STORE_BITS
    assert _constant("token_store.h", "kLargestPart") == layout.part_size(256)
    assert _constant("token_store.h", "kSmallestPart") == layout.part_size(96)


def test_masked_entries_have_a_bias_that_the_kernels_skip() -> None:
    assert _constant("slot_attention.h", "kMaskedBias") > MASKED

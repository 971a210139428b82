"""Weights of 4 bits in groups: their error, and their products."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends.torch_backend.config import Quantization
from backends.torch_backend.model.grouped_linear import (
    GroupedLinear,
    dequantize_groups,
    quantize_in_groups,
)
from backends.torch_backend.model.linear import KINDS, replace_all_linears
from backends.torch_backend.model.quantized_linear import GroupedProduct, QuantizedLinear, quantized_rows
from backends.torch_backend.native.kernels import GROUP, Kernels, kernels_are_supported, load_kernels
from tests.backends.checkpoints import load_oracle, save_checkpoint

needs_kernels = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def _linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, dtype=dtype)


def _check(output: Tensor, hidden: Tensor, grouped: GroupedLinear) -> None:
    assert grouped.bias is not None
    weight = dequantize_groups(grouped.weight)[: len(grouped.bias)]
    expected = nn.functional.linear(quantized_rows(hidden).double(), weight.double(), grouped.bias.double())
    tolerance = TOLERANCE[hidden.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def test_weights_are_near_and_those_of_16_levels_are_kept() -> None:
    weight = _random(70, 96).bfloat16()
    weight[4] = 0
    weight[5, 7] = -30
    error = dequantize_groups(quantize_in_groups(weight, Kernels()))[:70] - weight
    assert error[6:].square().mean() < 0.076**2
    assert not error[4].any()
    # As in GPTQ, AWQ and Q4_1 files.
    levels = torch.randint(16, (128, 3, GROUP), generator=torch.Generator().manual_seed(0))
    levels[:, :, 0], levels[:, :, 1] = 0, 15
    scales, zero_points = 2.0 ** torch.arange(-9, -6).view(3, 1), torch.arange(128).view(-1, 1, 1) % 16
    weight = ((levels - zero_points) * scales).flatten(1)
    assert torch.equal(dequantize_groups(quantize_in_groups(weight, Kernels())), weight)


def test_weights_that_are_quantized_in_several_parts_are_near() -> None:
    weight = _random(130, 4 * 1040)
    error = dequantize_groups(quantize_in_groups(weight, Kernels()))[:130] - weight
    assert error.view(130, -1, GROUP).square().mean(2).max() < 0.15**2


def test_groups_of_one_sign_are_no_worse_than_with_even_levels() -> None:
    weight = 5 + torch.rand(64, GROUP, generator=torch.Generator().manual_seed(0))
    weight[32:] *= -1
    error = dequantize_groups(quantize_in_groups(weight, Kernels())) - weight
    step = 6 / 15  # between 16 levels from 0 to 6
    assert error.square().mean() < 1.2 * step**2 / 12


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weight",
    [
        _random(130, 5 * GROUP),
        _random(1, GROUP),
        _random(1000, 64 * GROUP) * 0.02,  # in several parts
        _random(64, GROUP).abs() + 5,  # of one sign, and below of the other
        -5 - _random(70, 3 * GROUP).abs(),
        _random(128, 2 * GROUP) * (_random(128, 2 * GROUP) > 1.5),
        _random(128, 2 * GROUP) * torch.where(_random(128, 2 * GROUP) > 2.5, 50.0, 1.0),
        torch.full((64, GROUP), 0.3),
        torch.zeros(64, GROUP),
        _random(64, GROUP) * 1e-38,  # scales are at the least normal number
        _random(64, GROUP) * 1e18,
    ],
)
def test_the_kernel_quantizes_as_torch_does(built_kernels: Path, weight: Tensor, dtype: torch.dtype) -> None:
    """To the last bit: whether the kernels are built already does not change a model."""
    load_kernels(built_kernels)
    weight = weight.to(dtype)
    expected = quantize_in_groups(weight, Kernels())
    assert torch.equal(torch.ops.snapserve.quantize_in_groups(weight), expected)
    transposed = weight.T.contiguous().T
    for can_quantize in (False, True):
        assert torch.equal(quantize_in_groups(transposed, Kernels(can_quantize=can_quantize)), expected)


@needs_kernels
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("can_quantize", [False, True])
def test_a_weight_that_is_not_finite_reaches_its_output(
    built_kernels: Path, number: float, *, can_quantize: bool
) -> None:
    load_kernels(built_kernels)
    weight = _random(70, 2 * GROUP)
    weight[3, 40] = number
    quantized = dequantize_groups(quantize_in_groups(weight, Kernels(can_quantize=can_quantize)))
    assert quantized.isfinite().all(1).tolist() == [output != 3 for output in range(128)]
    assert quantized[3, :GROUP].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("sizes", [(64, 64), (96, 100), (1536, 40), (32, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_kernel(built_kernels: Path, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Of many rows and of few; each row's numbers are its own to the last bit."""
    load_kernels(built_kernels)
    grouped = GroupedLinear([_linear(*sizes, dtype)], Kernels(are_used=True))
    hidden = _random(550, sizes[0]).to(dtype)
    hidden[3] = 0
    hidden[4, 1] = 1000
    whole = grouped(hidden)
    _check(whole, hidden, grouped)
    for first, last in ((0, 1), (4, 5), (2, 4), (3, 6), (4, 12), (0, 40)):
        assert torch.equal(grouped(hidden[first:last, None])[:, 0], whole[first:last])
    hidden[1, 9] = float("nan")
    assert grouped(hidden[:3]).isfinite().all(1).tolist() == [True, False, True]


@needs_kernels
@pytest.mark.parametrize("num_rows", [1, 2, 8])
@torch.inference_mode()
def test_the_largest_products_do_not_overflow(built_kernels: Path, num_rows: int) -> None:
    """All levels are 15 and all numbers of a row 127 or -127. The kernels may sum them in 16 bits."""
    load_kernels(built_kernels)
    linear = nn.Linear(2 * GROUP, 64, bias=False)
    nn.init.constant_(linear.weight, 3.75)  # 15 quarters
    grouped = GroupedLinear([linear], Kernels(are_used=True))
    signs = torch.tensor([1.0, -1.0]).repeat(num_rows)[:num_rows, None]
    output = grouped(signs.expand(-1, 2 * GROUP).contiguous())
    torch.testing.assert_close(output, (signs * 3.75 * 2 * GROUP).expand(-1, 64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.inference_mode()
def test_without_kernels(dtype: torch.dtype) -> None:
    grouped = GroupedLinear([_linear(64, size, dtype) for size in (40, 72)], Kernels())
    hidden = _random(2, 3, 64).to(dtype)
    _check(grouped(hidden), hidden, grouped)


def test_other_layers_are_in_int8(tmp_path: Path) -> None:
    """The output layer, and layers whose inputs are no whole groups."""
    model = load_oracle(save_checkpoint("llama", tmp_path))
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Linear(GROUP + 4, 8)
    replace_all_linears(model, Kernels(), KINDS[Quantization.INT4])
    assert type(attention.o_proj) is QuantizedLinear
    assert type(model.get_output_embeddings()) is GroupedProduct  # type: ignore[no-untyped-call]
    assert type(model.model.layers[0].mlp.down_proj) is GroupedLinear


def test_an_output_layer_without_whole_groups_is_in_int8(tmp_path: Path) -> None:
    model = load_oracle(save_checkpoint("llama", tmp_path))
    model.lm_head = nn.Linear(GROUP + 4, 8)
    replace_all_linears(model, Kernels(), KINDS[Quantization.INT4])
    assert type(model.get_output_embeddings()) is QuantizedLinear  # type: ignore[no-untyped-call]

"""Experts against transformers' own modules of the same weights."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends.torch_backend.config import Quantization
from backends.torch_backend.model.experts import Experts, replace_experts
from backends.torch_backend.model.grouped_linear import dequantize_groups, quantize_in_groups
from backends.torch_backend.model.quantized_linear import quantize, quantized_rows
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported, load_kernels
from tests.backends.families import model_class, tiny_config

needs_kernels = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

# Neither the inner size nor, in one case, the width is whole blocks.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"hidden_size": 72}),
    ("gpt_oss", {}),  # clamped gates between what they multiply, and biases
    ("nemotron_h", {}),  # no gates
    ("aria", {}),  # weights are stored by input
    ("deepseek_v3", {}),
    ("lfm2_moe", {}),  # its activation is a function
    ("qwen3_moe", {"moe_intermediate_size": 128}),  # whole blocks
]
GELU = ("qwen2_moe", {"hidden_act": "gelu_pytorch_tanh"})
NUM_ROWS = 600  # more than one pass of an expert's rows
NUM_EXPERTS = 4
# Of the outputs' standard deviation. The largest error of many outputs is some times the usual one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
Choice = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def kernels(built_kernels: Path) -> Kernels:
    load_kernels(built_kernels)
    return Kernels(are_used=True)


def _theirs(family: tuple[str, dict[str, Any]], dtype: torch.dtype) -> Any:
    """Return transformers' experts with random weights."""
    model_type, change = family
    with torch.device("meta"):
        config = tiny_config(model_type, **change)
        model = model_class(config)(config)
    model.config._experts_implementation = "eager"
    experts: Any = next(module for module in model.modules() if hasattr(module, "is_concatenated"))
    experts = experts.to_empty(device="cpu").to(dtype)
    experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return experts.requires_grad_(requires_grad=False)


def _ours(theirs: nn.Module, kernels: Kernels, quantization: Quantization = Quantization.NONE) -> Experts:
    """Return what replaces a copy of transformers' experts."""
    model: Any = nn.ModuleDict({"experts": copy.deepcopy(theirs)})
    replace_experts(model, kernels, quantization)
    replaced = model["experts"]
    assert isinstance(replaced, Experts)
    return replaced


def _choice(theirs: Any, dtype: torch.dtype) -> Choice:
    """Return rows, and for each row its experts and their strengths. No row chooses the last expert."""
    generator = torch.Generator().manual_seed(1)
    width = theirs.down_proj.shape[2 if theirs.is_transposed else 1]
    hidden = torch.randn(NUM_ROWS, width, generator=generator).to(dtype)
    num_experts = theirs.down_proj.shape[0]
    chosen = torch.rand(NUM_ROWS, num_experts - 1, generator=generator).topk(2).indices
    strengths = torch.rand(NUM_ROWS, 2, generator=generator)
    return hidden, chosen, strengths


def _assert_close(output: Tensor, expected: Tensor, tolerance: float) -> None:
    limit = tolerance * expected.double().std().item()
    torch.testing.assert_close(output.double(), expected.double(), atol=limit, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, GELU], ids=lambda family: family[0])
@torch.inference_mode()
def test_equal_transformers(family: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    """Without the kernels, as any processor computes them."""
    theirs = _theirs(family, dtype)
    choice = _choice(theirs, dtype)
    _assert_close(
        _ours(theirs, Kernels())(*choice), theirs.double()(choice[0].double(), *choice[1:]), TOLERANCE[dtype]
    )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, GELU], ids=lambda family: family[0])
@torch.inference_mode()
def test_the_kernel_equals_transformers_and_is_batch_invariant(
    kernels: Kernels, family: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    theirs = _theirs(family, dtype)
    choice = _choice(theirs, dtype)
    ours = _ours(theirs, kernels)
    output = ours(*choice)
    _assert_close(output, theirs.double()(choice[0].double(), *choice[1:]), TOLERANCE[dtype])
    for first, last in ((0, 1), (2, 4), (3, 6), (7, 12), (8, 45), (500, NUM_ROWS)):
        assert torch.equal(ours(*(tensor[first:last] for tensor in choice)), output[first:last])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family[0])
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.W8A8])
@torch.inference_mode()
def test_int8_weights(
    built_kernels: Path, quantization: Quantization, family: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    """Before the kernels are used and after, against experts with what the int8 weights stand for."""
    load_kernels(built_kernels)
    theirs, kernels = _theirs(family, dtype), Kernels()
    hidden, *choice = _choice(theirs, dtype)
    ours = _ours(theirs, kernels, quantization)
    assert ours.first.nbytes < theirs.down_proj.nbytes * 3
    plain = ours(hidden, *choice)
    first = ours.first
    kernels.use()
    output = ours(hidden, *choice)
    assert ours.first is first, "graphs know it"
    # An integer of a row is now and then another one, where a number lies between two.
    _assert_close(output, plain, 0.1 if quantization is Quantization.W8A8 else TOLERANCE[dtype])
    assert torch.equal(ours(hidden[3:9], *(tensor[3:9] for tensor in choice)), output[3:9])
    for name, weight in theirs.named_parameters():
        if not name.endswith("bias"):
            weight.data.copy_(_dequantized(weight.data, is_transposed=theirs.is_transposed))
    if quantization is Quantization.INT8:
        _assert_close(output, theirs.double()(hidden.double(), *choice), TOLERANCE[dtype])


def _of_levels(theirs: Any) -> Any:
    """Return experts in float64, with the weights that those of 4 bits stand for."""
    of = copy.deepcopy(theirs).double()
    for name in ("gate_up_proj" if theirs.has_gate else "up_proj", "down_proj"):
        values = getattr(theirs, name).data
        by_output = values.mT if theirs.is_transposed else values
        packed = [quantize_in_groups(weight, Kernels()) for weight in by_output]
        plain = torch.stack([dequantize_groups(each)[: by_output.shape[1]] for each in packed]).double()
        getattr(of, name).data.copy_(plain.mT if theirs.is_transposed else plain)
    return of


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [("qwen3_moe", {"moe_intermediate_size": 96}), ("gpt_oss", {}), ("aria", {}), ("nemotron_h", {})],
    ids=lambda family: family[0],
)
@torch.inference_mode()
def test_weights_of_4_bits(
    built_kernels: Path, family: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    """Before the kernels are used and after, against experts with what the levels stand for."""
    load_kernels(built_kernels)
    theirs, kernels = _theirs(family, dtype), Kernels(can_quantize=True)
    hidden, *choice = _choice(theirs, dtype)
    ours = _ours(theirs, kernels, Quantization.INT4)
    assert ours.quantization is Quantization.INT4
    plain = ours(hidden, *choice)
    kernels.use()
    output = ours(hidden, *choice)
    _assert_close(output, plain, 0.02 if dtype is torch.float32 else 0.1)
    for first, last in ((0, 1), (2, 4), (3, 9), (8, 45), (500, NUM_ROWS)):
        assert torch.equal(
            ours(hidden[first:last], *(each[first:last] for each in choice)), output[first:last]
        )
    # transformers' inner values are not quantized: int8 numbers are up to 1/254 of their group's largest off.
    rows = quantized_rows(hidden).double()
    expected = _of_levels(theirs)(rows, *choice)
    assert (output.double() - expected).std() < 0.01 * expected.std()
    assert (theirs.double()(rows, *choice) - expected).std() > 0.05 * expected.std(), "the levels matter"


@torch.inference_mode()
def test_weights_of_4_bits_in_float16(kernels: Kernels) -> None:
    """No kernel has that type."""
    theirs = _theirs(("gpt_oss", {}), torch.float16)
    choice = _choice(theirs, torch.float16)
    expected = _of_levels(theirs)(quantized_rows(choice[0]).double(), *choice[1:])
    output = _ours(theirs, kernels, Quantization.INT4)(*choice)
    assert output.dtype is torch.float16
    assert (output.double() - expected).std() < 0.01 * expected.std()


@needs_kernels
@torch.inference_mode()
def test_experts_without_whole_groups_are_in_int8(kernels: Kernels) -> None:
    """Mixtral's here have a width of 72."""
    theirs = _theirs(FAMILIES[0], torch.float32)
    ours = _ours(theirs, kernels, Quantization.INT4)
    assert (ours.quantization, ours.first.dtype) == (Quantization.INT8, torch.int8)
    choice = _choice(theirs, torch.float32)
    assert torch.equal(ours(*choice), _ours(theirs, kernels, Quantization.INT8)(*choice))


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"first": torch.zeros(2, 2, 3, 1216).byte()},
            "first must have shape [2, 2, 2, 1216], got [2, 2, 3, 1216]",
        ),
        (
            {"first": torch.zeros(2, 2, 2, 1216), "second": torch.zeros(2, 1, 2, 1216)},
            "first must have dtype Byte, got Float",
        ),
        ({"first_scales": torch.ones(2, 128)}, "scales must be None for weights in groups, got a tensor"),
        ({"second": torch.zeros(2, 64, 64).byte()}, "second must have 4 dimensions as first has, got shape"),
        ({"second": torch.zeros(2, 2, 2, 1216).byte()}, "second must have shape [2, 1, 2, 1216], got"),
    ],
)
@torch.inference_mode()
def test_the_kernel_names_the_wrong_argument(
    kernels: Kernels,  # noqa: ARG001
    changes: dict[str, Any],
    message: str,
) -> None:
    """Of experts in groups: 2 of them, with gates, 64 inner values and 64 inputs."""
    arguments: dict[str, Any] = {
        "input": torch.zeros(3, 64),
        "chosen": torch.zeros(3, 1, dtype=torch.long),
        "strengths": torch.ones(3, 1),
        "first": torch.zeros(2, 2, 2, 1216).byte(),
        "first_scales": None,
        "first_bias": None,
        "second": torch.zeros(2, 1, 2, 1216).byte(),
        "second_scales": None,
        "second_bias": None,
        "activation": "silu",
        "slope": 0.0,
        "limit": 0.0,
    }
    assert not torch.ops.snapserve.experts(**arguments).any()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.ops.snapserve.experts(**(arguments | changes))


def _dequantized(weights: Tensor, *, is_transposed: bool) -> Tensor:
    by_output = weights.mT if is_transposed else weights
    numbers, scales = quantize(by_output.flatten(0, 1))
    values = (numbers.double() * scales.double()[:, None]).view(by_output.shape)
    return values.mT if is_transposed else values


@needs_kernels
@pytest.mark.parametrize("is_used", [False, True], ids=["plain", "kernels"])
@torch.inference_mode()
def test_choices_of_no_expert_and_rows_of_nan(built_kernels: Path, is_used: bool) -> None:
    """A row of NaN, such as one without a request, changes no other row. Neither does an expert of NaN."""
    load_kernels(built_kernels)
    theirs = _theirs(FAMILIES[0], torch.float32)
    theirs.down_proj[NUM_EXPERTS - 1] = theirs.gate_up_proj[NUM_EXPERTS - 1] = torch.nan  # never chosen
    hidden, chosen, strengths = _choice(theirs, torch.float32)
    ours = _ours(theirs, Kernels(are_used=is_used))
    expected = ours(hidden, chosen, strengths)
    assert expected.isfinite().all()
    hidden[5], strengths[6] = torch.nan, torch.nan
    chosen[7] = NUM_EXPERTS
    output = ours(hidden, chosen, strengths)
    assert output[5:7].isnan().all()
    assert (output[7] == 0).all()
    output[5:8] = expected[5:8]
    assert torch.equal(output, expected)


@torch.inference_mode()
def test_experts_with_an_unknown_activation_stay(kernels: Kernels) -> None:
    theirs = _theirs(("qwen2_moe", {"hidden_act": "tanh"}), torch.float32)
    model: Any = nn.ModuleDict({"experts": theirs})
    replace_experts(model, kernels, Quantization.NONE)
    assert model["experts"] is theirs

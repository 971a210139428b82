"""Int8 weights and rows against float64 products of the same integers, and a model against transformers'."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from backends.torch_backend.config import Quantization
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.grouped_linear import (
    dequantize_groups,
    quantize_in_groups,
)
from backends.torch_backend.model.linear import replace_all_linears
from backends.torch_backend.model.quantized_linear import (
    GroupedProduct,
    QuantizedLinear,
    QuantizedProduct,
    quantize,
)
from backends.torch_backend.native.kernels import GROUP, Kernels, kernels_are_supported, load_kernels
from cache.policy import PolicyName
from cache.policy_options import PolicyOptions
from tests.backends.checkpoints import load_oracle, save_checkpoint
from tests.backends.driver import GREEDY, Driver, Request, open_backend
from tests.backends.oracle import assert_same_logprobs, continue_greedily, random_prompt

needs_kernels = pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [QuantizedLinear, QuantizedProduct, GroupedProduct]
SIZES = [(64, 64), (96, 100), (1536, 70), (1540, 40), (36, 3), (34, 3), (32, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def kernels(built_kernels: Path) -> Kernels:
    load_kernels(built_kernels)
    return Kernels(are_used=True)


def _linear(inputs: int, outputs: int, dtype: torch.dtype, *, has_bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=has_bias, dtype=dtype)


def _dequantized(rows: Tensor) -> Tensor:
    numbers, scales = quantize(rows.flatten(0, -2))
    return (numbers.double() * scales.double()[:, None]).view(rows.shape)


def _dequantized_in_groups(rows: Tensor) -> Tensor:
    return _dequantized(rows.reshape(-1, GROUP)).view(rows.shape)


ROWS_OF = {
    QuantizedLinear: Tensor.double,
    QuantizedProduct: _dequantized,
    GroupedProduct: _dequantized_in_groups,
}


def _check(kind: type[QuantizedLinear], output: Tensor, hidden: Tensor, layer: nn.Linear) -> None:
    bias = None if layer.bias is None else layer.bias.double()
    expected = nn.functional.linear(ROWS_OF[kind](hidden), _dequantized(layer.weight.detach()), bias)
    torch.testing.assert_close(
        output.double(), expected, atol=TOLERANCE[hidden.dtype], rtol=TOLERANCE[hidden.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_weights_are_at_most_half_a_step_off(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[4] = 0
    weight[5, 7] = -30
    numbers, scales = quantize(weight)
    assert numbers.dtype is torch.int8
    assert numbers.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 4
    assert numbers[5, 7] == -127
    assert ((_dequantized(weight) - weight.double()).abs() <= scales.double()[:, None] * 0.5001).all()


@needs_kernels
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (kind, sizes)
        for kind in KINDS
        for sizes in SIZES
        if kind is not GroupedProduct or sizes[0] % GROUP == 0
    ],
)
@torch.inference_mode()
def test_the_kernel(
    kernels: Kernels, kind: type[QuantizedLinear], dtype: torch.dtype, sizes: tuple[int, int], has_bias: bool
) -> None:
    """Of many rows and of few; each row's numbers are its own to the last bit."""
    layer = _linear(*sizes, dtype, has_bias=has_bias)
    assert kind.is_packable(layer.weight) is (kind is QuantizedLinear or sizes[0] % 4 == 0)
    quantized = kind([layer], kernels)
    hidden = torch.randn(550, sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    hidden[3] = 0
    hidden[4, 1] = 1000
    whole = quantized(hidden)
    _check(kind, whole, hidden, layer)
    for first, last in ((0, 1), (2, 4), (3, 6), (7, 12), (0, 33)):
        assert torch.equal(quantized(hidden[first:last, None])[:, 0], whole[first:last])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_layers_are_used_before_the_kernels_are_there(
    built_kernels: Path, kind: type[QuantizedLinear]
) -> None:
    load_kernels(built_kernels)
    layers, kernels = [_linear(64, size, torch.bfloat16) for size in (40, 72)], Kernels()
    quantized = kind(layers, kernels)
    weight, hidden = quantized.weight, torch.randn(5, 64).bfloat16()
    both = _linear(64, 112, torch.bfloat16)
    both.weight.copy_(torch.cat([layer.weight for layer in layers]))
    both.bias.copy_(torch.cat([layer.bias for layer in layers]))
    _check(kind, quantized(hidden), hidden, both)
    kernels.use()
    _check(kind, quantized(hidden), hidden, both)
    assert quantized.weight is weight, "graphs know it"


@pytest.mark.parametrize(
    ("kind", "inputs", "dtype"),
    [
        (QuantizedLinear, 33, torch.bfloat16),
        (QuantizedProduct, 33, torch.bfloat16),
        *((kind, 64, torch.float16) for kind in KINDS),
    ],
)
@torch.inference_mode()
def test_weights_that_the_kernels_do_not_take(
    kind: type[QuantizedLinear], inputs: int, dtype: torch.dtype
) -> None:
    layer = _linear(inputs, 20, dtype)
    hidden = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    _check(kind, kind([layer], Kernels(are_used=True))(hidden), hidden, layer)


@needs_kernels
def test_sums_of_int8_rows_stay_within_32_bits() -> None:
    for inputs in (65536, 65540):
        assert QuantizedLinear.is_packable(torch.empty(1, inputs))
        assert QuantizedProduct.is_packable(torch.empty(1, inputs)) is (inputs == 65536)


@needs_kernels
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_number_that_is_not_finite_reaches_the_output(
    kernels: Kernels, kind: type[QuantizedLinear], number: float
) -> None:
    hidden = torch.ones(2, 64)
    hidden[1, 9] = number
    output = kind([_linear(64, 40, torch.float32)], kernels)(hidden)
    assert output.isfinite().all(1).tolist() == [True, False]


class _Made(TorchDispatchMode):
    """Notes the bytes of the largest tensor of real numbers that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.most = max(
            [
                self.most,
                *(
                    leaf.nbytes
                    for leaf in tree_leaves(result)
                    if isinstance(leaf, Tensor) and leaf.is_floating_point()
                ),
            ]
        )
        return result


@pytest.mark.parametrize("is_apart", [False, True], ids=["together", "apart"])
def test_without_kernels_the_weight_is_converted_in_parts(is_apart: bool) -> None:
    """Of rows that are apart either, such as the last ones of several chunks."""
    layer = _linear(64, 9000, torch.bfloat16)
    quantized, hidden = QuantizedLinear([layer], Kernels()), torch.randn(8, 5, 64).bfloat16()
    hidden = hidden[:, -1:] if is_apart else hidden[:1]
    with torch.no_grad(), _Made() as made:
        output = quantized(hidden)
    _check(QuantizedLinear, output, hidden, layer)
    assert 0 < made.most < layer.weight.nbytes / 2


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_sums_are_not_rounded_before_they_meet_their_bias(kind: type[QuantizedLinear]) -> None:
    """A bias may nearly cancel the product, as those of Qwen2's keys may."""
    layer = _linear(512, 64, torch.bfloat16)
    hidden = 30 * torch.randn(1, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    layer.bias.copy_(-nn.functional.linear(hidden[0].float(), layer.weight.float()))
    _check(kind, kind([layer], Kernels())(hidden), hidden, layer)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=3)


def _in_groups(weight: Tensor) -> Tensor:
    return dequantize_groups(quantize_in_groups(weight, Kernels()))[: len(weight)]


def _oracle(path: Path, quantization: Quantization) -> PreTrainedModel:
    """transformers' model with the numbers that the quantized weights and rows stand for."""
    model = load_oracle(path)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            is_grouped = quantization is Quantization.INT4 and module is not output
            with torch.no_grad():
                module.weight.copy_((_in_groups if is_grouped else _dequantized)(module.weight))
            if quantization is Quantization.INT4:
                module.register_forward_pre_hook(lambda _, inputs: _dequantized_in_groups(inputs[0]).float())
            if quantization is Quantization.W8A8:
                module.register_forward_pre_hook(lambda _, inputs: _dequantized(inputs[0]).float())
    return model


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=[needs_kernels, pytest.mark.long])])
@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.W8A8, Quantization.INT4])
def test_a_model_is_the_one_with_these_weights(
    llama: Path, compile_cache: Path, quantization: Quantization, is_compiled: bool
) -> None:
    """Tokens and log-probabilities, of prompts longer than a chunk and of several sequences at once."""
    cache = compile_cache if is_compiled else None
    backend = open_backend(
        llama, PolicyOptions(PolicyName.FULL), 64, compile_cache=cache, quantization=quantization
    )
    if is_compiled:
        assert backend.compiled is not None
        assert backend.compiled.times.load > 0
    driver = Driver(backend, 8)
    sampling = replace(GREEDY, num_logprobs=20)
    requests = [
        Request(random_prompt(length), slots=(slot,), sampling=sampling)
        for slot, length in enumerate((1, 9, 29))
    ]
    for request in requests:
        driver.read(request)
    driver.decode(*requests, num_steps=12, steps_a_launch=2)
    oracle = _oracle(llama, quantization)
    for request in requests:
        expected = continue_greedily(oracle, request.prompt, len(request.tokens))
        assert request.tokens == expected.tokens
        assert_same_logprobs(request.outputs[0], expected.logits, 20)
    backend.close()


def test_a_model_without_such_layers_is_refused(llama: Path) -> None:
    model = load_oracle(llama)
    for module in model.modules():
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear):
                setattr(module, name, nn.Identity())
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM has no linear layers that can be quantized"
    ):
        replace_all_linears(model, Kernels(), QuantizedLinear)

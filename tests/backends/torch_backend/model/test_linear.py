"""Replaced linear layers against the originals, and the independence of rows that batch invariance needs."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from backends.torch_backend.model.linear import (
    JoinedPart,
    ReorderedLinear,
    replace_all_linears,
    replace_linears,
)
from backends.torch_backend.native.kernels import Kernels, kernels_are_supported
from backends.torch_backend.torch_private import onednn

WIDTH, ROWS = 96, 8
DTYPES = [torch.float32, torch.bfloat16]


def _hidden(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def _linear(size: int, dtype: torch.dtype, *, has_bias: bool) -> nn.Linear:
    torch.manual_seed(size)
    return nn.Linear(WIDTH, size, bias=has_bias, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_reordered_layer_equals_the_layer(dtype: torch.dtype, has_bias: bool) -> None:
    linear, hidden = _linear(40, dtype, has_bias=has_bias), _hidden(dtype, 3, ROWS)
    torch.testing.assert_close(ReorderedLinear([linear], Kernels())(hidden), linear(hidden))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if onednn.supports(dtype)])
@torch.inference_mode()
def test_a_row_is_batch_invariant(dtype: torch.dtype) -> None:
    linear, hidden = ReorderedLinear([_linear(40, dtype, has_bias=True)], Kernels()), _hidden(dtype, 64)
    whole = linear(hidden)
    for num_rows in (2, 4, 8, 16):
        assert torch.equal(linear(hidden[:num_rows]), whole[:num_rows])


@pytest.mark.skipif(not kernels_are_supported(), reason="the processor has no AVX2 with FMA")
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 40])
@torch.inference_mode()
def test_many_rows_are_multiplied_in_float32_where_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, *, is_fast: bool
) -> None:
    monkeypatch.setattr(onednn, "supports", lambda _dtype: False)
    monkeypatch.setattr(onednn, "multiplies", lambda _dtype: is_fast)
    seen, multiply = list[torch.dtype](), nn.functional.linear

    def note(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(rows.dtype)
        return multiply(rows, weight, bias)

    linear, hidden = _linear(5000, torch.bfloat16, has_bias=True), _hidden(torch.bfloat16, num_rows)
    layer = ReorderedLinear([linear], Kernels())
    monkeypatch.setattr(nn.functional, "linear", note)
    output = layer(hidden)
    is_converted = num_rows >= 16 and not is_fast
    assert set(seen) == {torch.float32 if is_converted else torch.bfloat16}
    assert (len(seen) > 1) == is_converted, "the weight is converted in parts"
    expected = multiply(hidden.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(output.double(), expected, atol=1e-2, rtol=1e-2)


def test_a_layer_of_another_type_is_not_replaced() -> None:
    assert not ReorderedLinear.fits(nn.Linear(WIDTH, 8, dtype=torch.float64))


class Projections(nn.Module):
    """Attention's three, called in any order and on any input."""

    def __init__(self, *, mixed_biases: bool) -> None:
        super().__init__()
        self.q_proj = _linear(40, torch.float32, has_bias=True)
        self.k_proj = _linear(20, torch.float32, has_bias=not mixed_biases)
        self.v_proj = _linear(24, torch.float32, has_bias=True)
        self.o_proj = nn.Identity()

    def forward(self, hidden: Tensor, order: str) -> list[Tensor]:
        return [getattr(self, f"{name}_proj")(hidden) for name in order]


@pytest.mark.parametrize("mixed_biases", [False, True])
@pytest.mark.parametrize("order", ["qkv", "vkq", "qqkv", "qk"])
@torch.inference_mode()
def test_joined_layers_equal_the_layers(order: str, mixed_biases: bool) -> None:
    original, replaced = (Projections(mixed_biases=mixed_biases) for _ in range(2))
    replace_linears(replaced, Kernels())
    assert isinstance(replaced.get_submodule("q_proj"), ReorderedLinear if mixed_biases else JoinedPart)
    for hidden in (
        _hidden(torch.float32, 2, ROWS),
        _hidden(torch.float32, 1),
    ):  # the second finds nothing of the first
        torch.testing.assert_close(replaced(hidden, order), original(hidden, order))


@torch.inference_mode()
def test_a_whole_model_keeps_its_logits_and_its_embedding() -> None:
    """The output layer is tied to the embedding, which must stay as it is."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    replace_all_linears(model, Kernels())
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    torch.testing.assert_close(model(ids).logits, expected)

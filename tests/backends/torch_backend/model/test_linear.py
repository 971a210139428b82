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
from backends.torch_backend.native.kernels import Kernels
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

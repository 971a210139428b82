"""The experts of a mixture: each row passes through those that a router chose for it, and no others are read.

The router, and shared experts, are the model's own modules.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations import moe

from backends.torch_backend.config import Quantization
from backends.torch_backend.model.grouped_linear import grouped_product, quantize_in_groups
from backends.torch_backend.model.quantized_linear import (
    QuantizedLinear,
    QuantizedProduct,
    quantize_weight,
    quantized_product,
)
from backends.torch_backend.native.kernels import (
    BLOCK,
    GROUP,
    ExpertWeights,
    Kernels,
    in_blocks,
    packed_experts,
    takes_weight,
)

logger = logging.getLogger(__name__)

# By the kernel's names.
_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "squared_relu": lambda values: relu(values).square(),
}
_CLAMPED_SWISH: Final = "clamped_swish"
# By the functions and the types of the modules in which transformers has them.
_ACTIVATION_NAMES: Final[dict[object, str]] = {
    silu: "silu",
    SiLUActivation: "silu",
    nn.SiLU: "silu",
    GELUTanh: "gelu_tanh",
    ReLUSquaredActivation: "squared_relu",
}
_IS_PACKABLE: Final[dict[Quantization, Callable[[Tensor], bool]]] = {
    Quantization.NONE: takes_weight,
    Quantization.INT8: QuantizedLinear.is_packable,
    Quantization.W8A8: QuantizedProduct.is_packable,
    Quantization.INT4: QuantizedLinear.is_packable,
}


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that an expert's outputs have: one, or gates and what they multiply."""

    count: int
    is_interleaved: bool = False

    def arranged(self, outputs: Tensor) -> Tensor:
        """Return weights or biases [output, …] part after part, each one with zeros up to whole blocks."""
        if self.is_interleaved:
            parts = [outputs[part :: self.count] for part in range(self.count)]
        else:
            parts = [*outputs.chunk(self.count)]
        zeros = outputs.new_zeros(-parts[0].shape[0] % BLOCK, *outputs.shape[1:])
        return torch.cat([piece for part in parts for piece in (part, zeros)])

    def stored(
        self, weights: Tensor, quantization: Quantization, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None]:
        """Return weights [expert, output, input] as they are held, and the scales of int8 ones."""
        if quantization is Quantization.INT4:
            return torch.stack(
                [quantize_in_groups(self.arranged(weight), kernels) for weight in weights]
            ), None
        if quantization is Quantization.NONE:
            is_whole = weights.shape[1] % (self.count * BLOCK) == 0
            if is_whole and not self.is_interleaved and weights.is_contiguous():
                return weights, None
            return torch.stack([self.arranged(weight) for weight in weights]), None
        for_rows = quantization is Quantization.W8A8
        pairs = [quantize_weight(weight, for_quantized_rows=for_rows) for weight in weights]
        numbers, scales = (
            torch.stack([self.arranged(each) for each in side]) for side in zip(*pairs, strict=True)
        )
        return numbers, scales


class Experts(nn.Module):
    """Replaces transformers' module of all experts of a layer.

    With the kernels, a row's output does not depend on the other rows.
    """

    # As of `ExpertWeights`, with whole blocks of outputs. Packed as soon as the kernels are used; in 4 bits,
    # at once. Of gated experts, the gates are before what they multiply.
    first: Tensor
    first_scales: Tensor | None
    first_bias: Tensor | None
    second: Tensor
    second_scales: Tensor | None
    second_bias: Tensor | None

    def __init__(self, experts: Any, activation: str, kernels: Kernels, quantization: Quantization) -> None:
        super().__init__()
        down: Tensor = experts.down_proj
        self._kernels = kernels
        self._activation = activation
        self._slope = float(getattr(experts, "alpha", 0.0))  # of a clamped swish
        self._limit = float(getattr(experts, "limit", 0.0))
        self._is_gated: bool = experts.has_gate
        self._num_outputs, self._num_inner = down.mT.shape[1:] if experts.is_transposed else down.shape[1:]
        # An expert has as many outputs as inputs.
        has_groups = self._num_outputs % GROUP == self._num_inner % GROUP == 0
        self.quantization = (
            Quantization.INT8 if quantization is Quantization.INT4 and not has_groups else quantization
        )
        up_name = "gate_up_proj" if self._is_gated else "up_proj"
        halves = _Parts(2, is_interleaved=not experts.is_concatenated) if self._is_gated else _Parts(1)
        for product, name, parts in (("first", up_name, halves), ("second", "down_proj", _Parts(1))):
            loaded: Tensor = getattr(experts, name).detach()
            by_output = loaded.mT if experts.is_transposed else loaded
            weight, scales = parts.stored(by_output, self.quantization, kernels)
            bias = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
            arranged = None if bias is None else torch.stack([parts.arranged(each) for each in bias])
            self.register_buffer(product, weight, persistent=False)
            self.register_buffer(f"{product}_scales", scales, persistent=False)
            self.register_buffer(f"{product}_bias", arranged, persistent=False)
        self._row_dtype = torch.int8 if self.quantization is Quantization.W8A8 else down.dtype
        self._is_packable = all(
            _IS_PACKABLE[self.quantization](down.new_empty(1, num_inputs))
            for num_inputs in (self._num_outputs, self._num_inner)
        )
        if self._is_packable and self.quantization is not Quantization.INT4:
            kernels.when_used(self._pack)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sums of the chosen experts' outputs, [row, width].

        `top_k_index` and `top_k_weights` are [row, choice].
        """
        first = ExpertWeights(self.first, self.first_scales, self.first_bias)
        second = ExpertWeights(self.second, self.second_scales, self.second_bias)
        if self._is_packable and self._kernels.are_used:
            return packed_experts(
                hidden_states,
                top_k_index,
                top_k_weights,
                first,
                second,
                activation=self._activation,
                slope=self._slope,
                limit=self._limit,
            )
        output = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.first.shape[0]:  # how transformers says that a choice is of no expert
                continue
            rows, choices = torch.where(top_k_index == expert)
            products = _multiply(hidden_states[rows], first, expert)
            inner = self._activated(products)[:, : self._num_inner]
            outputs = _multiply(inner, second, expert)[:, : self._num_outputs]
            output.index_add_(0, rows, outputs.float() * top_k_weights[rows, choices, None].float())
        return output.to(hidden_states.dtype)

    def _activated(self, products: Tensor) -> Tensor:
        if not self._is_gated:
            return _ACTIVATIONS[self._activation](products)
        gates, values = products.chunk(2, dim=-1)
        if self._activation == _CLAMPED_SWISH:
            gates = gates.clamp(max=self._limit)
            values = values.clamp(min=-self._limit, max=self._limit)
            return (values + 1) * gates * torch.sigmoid(gates * self._slope)
        return _ACTIVATIONS[self._activation](gates) * values

    def _pack(self) -> None:
        """Convert the weights to the kernels' layout in place. Graphs traced before refer to them."""
        for weight in (self.first, self.second):
            for each in weight:
                each.copy_(in_blocks(each, self._row_dtype).reshape(each.shape))


def replace_experts(model: PreTrainedModel, kernels: Kernels, quantization: Quantization) -> None:
    """Replace the experts of a model on a CPU. Those with an unknown activation stay transformers' own."""
    # Names: a list of the modules would hold every weight until the last one is replaced.
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if _activation(child) is not None
    ]
    kinds = Counter[Quantization]()
    num_bytes = 0
    for module, name in places:
        experts: Any = module.get_submodule(name)
        activation = _activation(experts)
        if activation is not None:
            replacement = Experts(experts, activation, kernels, quantization)
            setattr(module, name, replacement)
            kinds[replacement.quantization] += 1
            num_bytes += replacement.first.nbytes + replacement.second.nbytes
    if num_bytes and quantization is not Quantization.NONE:
        counts = ", ".join(f"{count} in {kind}" for kind, count in kinds.items())
        logger.info("experts are quantized, by layer: %s; %.1f MB", counts, num_bytes / 1e6)


def has_experts(model: PreTrainedModel) -> bool:
    return any(hasattr(module, "is_concatenated") for module in model.modules())


def _activation(module: Any) -> str | None:
    """Return the kernel's name for the activation of transformers' experts; None for other modules."""
    if not hasattr(module, "is_concatenated") or module.has_post_expert_norm:
        return None
    if type(module).__name__ == "GptOssExperts":
        return _CLAMPED_SWISH
    if module._apply_gate.__module__ != moe.__name__:  # a type's own gate
        return None
    return _ACTIVATION_NAMES.get(module.act_fn) or _ACTIVATION_NAMES.get(type(module.act_fn))


def _multiply(rows: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """Return the product of rows with an expert's weights in their plain layout: [row, output]."""
    weight = weights.weight[expert]
    bias = None if weights.bias is None else weights.bias[expert]
    if weights.scales is not None:
        product = quantized_product(rows, weight, weights.scales[expert])
    elif weight.dtype is torch.uint8:
        product = grouped_product(rows, weight)
    else:
        return linear(rows, weight, bias)
    return (product if bias is None else product + bias).to(rows.dtype)

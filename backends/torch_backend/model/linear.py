"""Linear layers of a loaded model, with weights in the layout of the CPU's matrix units, or quantized.

A decode step multiplies a few rows by every weight. torch's product reorders the weight in each call, or uses
a kernel that is slower for fewer rows. oneDNN's product takes a weight in its own layout. It is used until
the kernel in `native/` is compiled, which reads the same layout. That kernel runs at nearly the memory's rate
for few rows and at oneDNN's speed for many, with fused prologues and epilogues. Layers with the same input
are joined into one product.

oneDNN promises no layout: it depends on the processor. Where it is not the kernel's, and where oneDNN has no
bfloat16, the weight is packed here, and torch multiplies by the plain weight until the kernel is used.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.config import Quantization
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.grouped_linear import GroupedLinear
from backends.torch_backend.model.quantized_linear import (
    GroupedProduct,
    QuantizedLinear,
    QuantizedProduct,
    parts_of,
)
from backends.torch_backend.native.kernels import (
    Kernels,
    in_blocks,
    packed_linear,
    packed_weight,
    takes_weight,
)
from backends.torch_backend.torch_private import onednn

logger = logging.getLogger(__name__)

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
ALONE = (
    "o_proj",
    "q_b_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    "w2",
    "in_proj",
    "out_proj",
    "input_linear",
    "output_linear",
)
_MANY_ROWS = 16  # for which a product in float32 is worth a copy of the weight
_ROWS = 8  # rows for which oneDNN selects the layout; the one for 8 was as fast for 1 and for 512


class ReorderedLinear(nn.Module):
    """The outputs of one or several linear layers, side by side.

    A row's output does not depend on the other rows.

    For oneDNN, this was measured on x86-64 in float32 and bfloat16: the bits are equal from 2 rows on. A
    single row uses another kernel. torch's product, used until the kernels are where oneDNN has another
    layout or no bfloat16, promises nothing of the kind.
    """

    packed: Tensor | None
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._kernels = kernels
        self._num_outputs = weight.shape[0]
        reordered = onednn.reorder(weight, _ROWS) if onednn.supports(weight.dtype) else None
        packed = None if reordered is None else packed_weight(reordered, weight)
        must_pack = packed is None and takes_weight(weight)
        if must_pack:
            reordered = None
            blocks = in_blocks(weight, weight.dtype)
            packed = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        self._weight = reordered
        self._plain = weight if reordered is None else None
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)
        if must_pack:
            kernels.when_used(self._pack)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        weight = linear.weight
        return weight.device.type == "cpu" and (onednn.supports(weight.dtype) or takes_weight(weight))

    def forward(self, hidden: Tensor) -> Tensor:
        if self._kernels.are_used and self.packed is not None:
            return packed_linear(hidden, self.packed, self.bias, self._num_outputs)
        if self._plain is not None:
            return plain_linear(hidden, self._plain, self.bias)
        assert self._weight is not None
        return onednn.linear(hidden, self._weight, self.bias)

    def _pack(self) -> None:
        assert self.packed is not None
        assert self._plain is not None
        self.packed.copy_(in_blocks(self._plain, self._plain.dtype))
        self._plain = None


def plain_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of rows [..., input] and a plain weight, plus the bias: [..., output].

    Many rows are multiplied in float32 where the CPU has no product in bfloat16.
    """
    if not onednn.is_slow(weight) or hidden.numel() < _MANY_ROWS * hidden.shape[-1]:
        return nn.functional.linear(hidden, weight, bias)
    rows = hidden.float()
    output = hidden.new_empty(*hidden.shape[:-1], weight.shape[0])
    first = 0
    for part in parts_of(weight, rows.dtype):  # of the float32 products, one part is held at a time
        last = first + part.shape[0]
        product = nn.functional.linear(rows, part.float())
        output[..., first:last] = product if bias is None else product + bias[first:last]
        first = last
    return output


LinearKind = type[ReorderedLinear] | type[QuantizedLinear] | type[GroupedLinear]
KINDS: dict[Quantization, LinearKind] = {
    Quantization.NONE: ReorderedLinear,
    Quantization.INT8: QuantizedLinear,
    Quantization.W8A8: QuantizedProduct,
    Quantization.INT4: GroupedLinear,
}


class JoinedLinear:
    """One product for several layers.

    It holds their outputs from the first layer's call until each is fetched.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear = linear
        self._sizes = sizes
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def fetch(self, hidden: Tensor, part: int) -> Tensor:
        """Return the output of the layer at index `part`."""
        # The input tensor's identity shows whether the outputs are this call's. A part that was already
        # fetched shows that the tensor is reused, with new values.
        if hidden is not self._input or part not in self._outputs:
            self._input = hidden
            self._outputs = dict(enumerate(self.linear(hidden).split(self._sizes, dim=-1)))
        output = self._outputs.pop(part)
        if not self._outputs:
            self._input = None
        return output


class JoinedPart(nn.Module):
    """Replaces one of the layers of a joined product."""

    def __init__(self, joined: JoinedLinear, part: int) -> None:
        super().__init__()
        self._joined = joined
        self._part = part
        self.linear = joined.linear  # a submodule: the weight is among the model's

    def forward(self, hidden: Tensor) -> Tensor:
        return self._joined.fetch(hidden, self._part)


def replace_all_linears(model: PreTrainedModel, kernels: Kernels, kind: LinearKind = ReorderedLinear) -> None:
    """Replace the model's linear layers of the usual names, and its output layer, if `kind` supports them.

    With `GroupedLinear`, the output layer becomes `GroupedProduct` where the kernels will multiply it. It and
    other layers that do not fit become `QuantizedLinear`. Raises UnsupportedModelError if no layer can be
    quantized as required.
    """
    others = QuantizedLinear if kind is GroupedLinear else kind
    # Without the linear layers: a list of them would hold every weight until the last one is replaced.
    for module in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
        replace_linears(module, kernels, kind)
        if others is not kind:
            replace_linears(module, kernels, others)
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # The output layer keeps 8 bits: its errors are those of the logits.
    kinds = (GroupedProduct, QuantizedLinear) if kind is GroupedLinear else (kind,)
    for output_kind in kinds:
        if type(output) is nn.Linear and output_kind.fits(output):
            model.set_output_embeddings(output_kind([output], kernels))  # type: ignore[no-untyped-call]
            break
    if kind is not ReorderedLinear:
        _log_quantized(model)


def replace_linears(module: nn.Module, kernels: Kernels, kind: LinearKind = ReorderedLinear) -> None:
    """Replace the linear layers of one module, not of its submodules. Joinable layers are joined."""
    for names in JOINED:
        linears = list(_linears(module, names, kind))
        if len(linears) == len(names) and _are_joinable(linears):
            joined = JoinedLinear(kind(linears, kernels), [linear.out_features for linear in linears])
            for part, name in enumerate(names):
                setattr(module, name, JoinedPart(joined, part))
    for name in (*itertools.chain(*JOINED), *ALONE):
        for linear in _linears(module, (name,), kind):
            setattr(module, name, kind([linear], kernels))


def _linears(module: nn.Module, names: Sequence[str], kind: LinearKind) -> Iterator[nn.Linear]:
    for name in names:
        linear = module._modules.get(name)
        if type(linear) is nn.Linear and kind.fits(linear):
            yield linear


def _log_quantized(model: PreTrainedModel) -> None:
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear | GroupedLinear)]
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layers that can be quantized")
    for kind, name in ((GroupedLinear, "int4"), (QuantizedLinear, "int8")):
        sizes = [layer.weight.nbytes for layer in layers if isinstance(layer, kind)]
        if sizes:
            logger.info("%d products have %s weights: %.1f MB", len(sizes), name, sum(sizes) / 1e6)
    unquantized = sum(parameter.nbytes for parameter in model.parameters())
    logger.info("%.1f MB of weights are not quantized", unquantized / 1e6)


def _are_joinable(linears: Sequence[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}) == 1

"""Linear layers of a loaded model, their weights laid out once for the CPU's matrix units, or kept as int8.

A decode step is a few rows against every weight. torch's own product reorders the weight for each call, or falls back on a kernel that is
slower the fewer the rows. oneDNN's, given the weight in its own layout, does not. It stands in until the kernel in `native/` is there,
which reads the same layout: few rows at nearly the memory's rate, many as fast as oneDNN, and with what is done before and after them.
Layers that read the same input become one product of their joined weights, which the first of them computes for the others too.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.torch_backend.config import Quantization
from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.quantized_linear import QuantizedLinear, QuantizedProduct
from backends.torch_backend.native.kernels import Kernels, packed_linear, packed_weight
from backends.torch_backend.torch_private import onednn

logger = logging.getLogger(__name__)

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
ALONE = ("o_proj", "q_b_proj", "down_proj", "qkv_proj", "gate_up_proj")
_ROWS = 8  # oneDNN chooses a layout for this many; it was as good for 1 and for 512


class ReorderedLinear(nn.Module):
    """The sum of one or several linear layers' outputs, side by side. Its results for a row do not depend on the other rows.

    (oneDNN's, measured on x86-64 in float32 and bfloat16: equal bits from 2 rows on; a single row takes another way.)
    """

    packed: Tensor | None
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__()
        weight = (
            torch.cat([linear.weight.detach() for linear in linears])
            if len(linears) > 1
            else linears[0].weight.detach()
        )
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._kernels, self._num_outputs = kernels, weight.shape[0]
        self._weight = onednn.reorder(weight, _ROWS)
        self.register_buffer("packed", packed_weight(self._weight, weight), persistent=False)
        self.register_buffer("bias", torch.cat(biases) if biases else None, persistent=False)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        return linear.weight.device.type == "cpu" and onednn.supports(linear.weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._kernels.are_used and self.packed is not None:
            return packed_linear(hidden, self.packed, self.bias, self._num_outputs)
        return onednn.linear(hidden, self._weight, self.bias)


LinearKind = type[ReorderedLinear] | type[QuantizedLinear]
KINDS: dict[Quantization, LinearKind] = {
    Quantization.NONE: ReorderedLinear,
    Quantization.INT8: QuantizedLinear,
    Quantization.W8A8: QuantizedProduct,
}


class Joint:
    """One product for several layers. It holds their outputs from the first layer's call until each has been fetched."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear, self._sizes = linear, sizes
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def fetch(self, hidden: Tensor, part: int) -> Tensor:
        """Return the output of layer number `part`."""
        if hidden is not self._input or part not in self._outputs:
            self._input, self._outputs = (
                hidden,
                dict(enumerate(self.linear(hidden).split(self._sizes, dim=-1))),
            )
        output = self._outputs.pop(part)
        if not self._outputs:
            self._input = None
        return output


class JointPart(nn.Module):
    """Stands where one of a joint's layers stood."""

    def __init__(self, joint: Joint, part: int) -> None:
        super().__init__()
        self._joint, self._part = joint, part
        self.linear = joint.linear  # so that the weight is found among the model's

    def forward(self, hidden: Tensor) -> Tensor:
        return self._joint.fetch(hidden, self._part)


def replace_all_linears(model: PreTrainedModel, kernels: Kernels, kind: LinearKind = ReorderedLinear) -> None:
    """Replace the model's linear layers of the usual names, and the output layer, where that can be.

    Raises UnsupportedModelError if it was to be quantized and there is nothing that can be.
    """
    for module in list(model.modules()):
        replace_linears(module, kernels, kind)
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(output) is nn.Linear and kind.fits(output):
        model.set_output_embeddings(kind([output], kernels))  # type: ignore[no-untyped-call]
    if issubclass(kind, QuantizedLinear):
        _tell_of_quantized(model)


def replace_linears(module: nn.Module, kernels: Kernels, kind: LinearKind = ReorderedLinear) -> None:
    """Replace a module's own linear layers: the joinable by parts of a joint, the others one by one."""
    for names in JOINED:
        linears = list(_linears(module, names, kind))
        if len(linears) == len(names) and _are_joinable(linears):
            joint = Joint(kind(linears, kernels), [linear.out_features for linear in linears])
            for part, name in enumerate(names):
                setattr(module, name, JointPart(joint, part))
    for name in (*itertools.chain(*JOINED), *ALONE):
        for linear in _linears(module, (name,), kind):
            setattr(module, name, kind([linear], kernels))


def _linears(module: nn.Module, names: Sequence[str], kind: LinearKind) -> Iterator[nn.Linear]:
    for name in names:
        linear = module._modules.get(name)
        if type(linear) is nn.Linear and kind.fits(linear):
            yield linear


def _tell_of_quantized(model: PreTrainedModel) -> None:
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layers that can be quantized")
    sizes = (
        sum(layer.weight.nbytes for layer in layers),
        sum(parameter.nbytes for parameter in model.parameters()),
    )
    logger.info(
        "%d products have weights of int8: %.1f MB; %.1f MB of weights are as they were",
        len(layers),
        *(size / 1e6 for size in sizes),
    )


def _are_joinable(linears: Sequence[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}) == 1

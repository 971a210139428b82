"""A layer's work on a prompt's chunk as few operators: traced and fused like a decode step, but not compiled.

Beside the kernels only views are left, for which a compiler would do nothing. The cache computes the
attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backends.torch_backend.compiled.layer_function import LayerFunction, TracedCache
from backends.torch_backend.compiled.trace import GraphError, InputSpec
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.stand_in import LayerCall
from backends.torch_backend.model.attention import AttentionOptions
from backends.torch_backend.model.recurrent import Mix
from backends.torch_backend.torch_private.graph_code import function_of

ChunkCode = Callable[..., Any]  # called with a `ChunkAttention` and a layer's tensors

# An operator without a kernel: it marks the attention in the traced graph, whose text then calls
# `ChunkAttention`.
_library = torch.library.Library("snapserve", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "cached_attention(Tensor query, Tensor key, Tensor value, float scaling, float? softcap, Tensor? sinks)"
    " -> Tensor"
)


@torch.library.register_fake("snapserve::cached_attention", lib=_library)  # type: ignore[untyped-decorator]
def _attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


class _ChunkCache(TracedCache):
    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:  # noqa: ARG002
        raise GraphError("rows with states are read one by one")

    def attend(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        output: Tensor = torch.ops.snapserve.cached_attention(
            query, key, value, options.scaling, options.softcap, options.sinks
        )
        return output


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """The cache write and the attention of one layer, as its code calls them."""

    cache: ModelCache
    layer: int

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        keys, values = self.cache.update(key, value, self.layer)
        options = AttentionOptions(scaling, softcap, sinks)
        return self.cache.attend(self.layer, query, keys, values, options).contiguous()


def chunk_code(layer: LayerFunction, call: LayerCall) -> ChunkCode:
    """Return the code of a call with a chunk [row, token, …] of any size. Raises GraphError."""
    tensors = call.tensors()
    chunk = tensors[0].shape[:2]
    call_inputs = []
    for tensor in tensors:
        spec = InputSpec.of(tensor)
        is_chunk = spec.sizes[:2] == chunk
        call_inputs.append(replace(spec, sizes=("rows", "tokens", *spec.sizes[2:])) if is_chunk else spec)
    source = layer.trace(call, call_inputs, (), _ChunkCache)
    return function_of(source.code.replace("torch.ops.snapserve.cached_attention.default(", "self.attend("))

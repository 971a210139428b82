"""A layer's work on a prompt's chunk as a list of few operators: traced once, with what kernels can do moved into them, and run as it is.

Nothing is compiled for it: beside the kernels only views are left. The attention stays the cache's business.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backends.torch_backend.compiled.layer_calls import LayerFunction, TracedCache
from backends.torch_backend.compiled.trace import InputSpec
from backends.torch_backend.forward.cache import ModelCache
from backends.torch_backend.forward.stand_in import LayerCall
from backends.torch_backend.model.attention import AttentionOptions
from backends.torch_backend.torch_private.inductor import function_of

ChunkCode = Callable[..., Any]  # of a `ChunkAttention` and a layer's tensors

_library = torch.library.Library("snapserve", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "cached_attention(Tensor query, Tensor key, Tensor value, float scaling, float? softcap, Tensor? sinks) -> Tensor"
)


@torch.library.register_fake("snapserve::cached_attention", lib=_library)  # type: ignore[untyped-decorator]
def _attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


class _ChunkCache(TracedCache):
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
    """What a layer's code calls where the layer would write to the cache and attend."""

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
        return self.cache.attend(
            self.layer, query, keys, values, AttentionOptions(scaling, softcap, sinks)
        ).contiguous()


def chunk_code(layer: LayerFunction, call: LayerCall) -> ChunkCode:
    """Return the code of a call with a chunk [row, token, …]; both numbers are open, for it is not compiled. Raises GraphError."""
    tensors = call.tensors()
    chunk = tensors[0].shape[:2]
    plain = [InputSpec.of(tensor) for tensor in tensors]
    given = [
        replace(spec, sizes=("rows", "tokens", *spec.sizes[2:])) if spec.sizes[:2] == chunk else spec
        for spec in plain
    ]
    source = layer.trace(call, given, (), _ChunkCache)
    return function_of(source.code.replace("torch.ops.snapserve.cached_attention.default(", "self.attend("))

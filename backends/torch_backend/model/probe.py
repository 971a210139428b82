"""Finds the cache that a model's layers need, by recording one forward pass.

A configuration can omit things. The tensors that each layer passes to its cache and its attention decide
whether slots can store its keys and values, or its latents, and how wide they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.attention import AttentionOptions
from cache.slots import PlaneSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    planes: tuple[PlaneSpec, ...]  # keys and values, or latents
    sliding_window: int | None  # tokens that a query sees, its own included; None: all


def probe_layers(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Return the specs of the model's layers.

    Raises UnsupportedModelError for a layer that does not call its cache and its attention once each.
    """
    name = type(model).__name__
    num_layers = model.config.num_hidden_layers
    vocab_size = model.config.vocab_size
    probe = _ProbeCache(num_layers)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                position_ids=ids,
                past_key_values=probe,
                use_cache=True,
                logits_to_keep=1,
                slot_cache=probe,
            ).logits
    # The errors by which a model's code may fail with an unknown cache.
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsupportedModelError(f"{name} does not run with a cache of slots: {error}") from error
    if logits.shape != (1, 1, vocab_size):
        raise UnsupportedModelError(
            f"{name} returns logits of shape {tuple(logits.shape)}, expected (1, 1, {vocab_size})"
        )
    return tuple(probe.spec(layer, name) for layer in range(num_layers))


class PassingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A cache layer without a state: each pass sees its own keys and values only."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to initialise."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _ProbeLayer(PassingLayer):
    """Records the tensors that its layer wrote: keys and values, or latents."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Tensor, ...]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.written.append((key_states, value_states))
        return key_states, value_states


class _ProbeCache(Cache):
    """Records every layer's calls. Its attention returns zeros."""

    def __init__(self, num_layers: int) -> None:
        self._probes = [_ProbeLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self._probes))
        self._seen: list[list[tuple[Tensor, Tensor, Tensor, int | None]]] = [[] for _ in range(num_layers)]

    def store(self, layer: int, latents: Tensor) -> Tensor:
        self._probes[layer].written.append((latents,))
        return latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self._seen[layer].append((query, key, value, options.sliding_window))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def spec(self, layer: int, name: str) -> LayerSpec:
        written = self._probes[layer].written
        seen = self._seen[layer]
        if len(written) != 1 or len(seen) != 1:
            raise UnsupportedModelError(
                f"layer {layer} of {name} must call its cache and its attention once each, "
                f"got {len(written)} and {len(seen)} calls"
            )
        query, key, value, sliding_window = seen[0]
        held = written[0]
        names = ("key", "value") if len(held) == 2 else ("latent",)
        if len(held) == 2 and (key is not held[0] or value is not held[1]):
            raise UnsupportedModelError(
                f"layer {layer} of {name} attends over other tensors than it caches "
                "(multi-head latent attention?)"
            )
        planes = tuple(
            PlaneSpec(plane, tensor.shape[3], tensor.dtype) for plane, tensor in zip(names, held, strict=True)
        )
        return LayerSpec(query.shape[1], held[0].shape[1], planes, sliding_window)

"""One pool of slots on the device: where its sequences lie, and how their next tokens are chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import SlotPoolSpec
from backends.torch_backend.forward.cache import CacheLayer, LayerKind, ModelCache
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.native.kernels import Kernels
from backends.torch_backend.sampling.sampler import Sampler
from cache.slots import SlotCache


@dataclass(frozen=True, slots=True)
class TorchPool:
    """Pools have nothing in common but the scratches, which no two prompts hold at once."""

    spec: SlotPoolSpec
    kinds: tuple[LayerKind, ...]
    cache: ModelCache
    sampler: Sampler

    @classmethod
    def build(
        cls,
        spec: SlotPoolSpec,
        kinds: Sequence[LayerKind],
        kind_of: Sequence[int],
        layers: Sequence[LayerSpec],
        scratches: Sequence[SlotCache],
        vocab_size: int,
        device: torch.device,
        kernels: Kernels,
    ) -> "TorchPool":
        """Allocate the slots of a model with these layers; `kind_of` and `scratches` have an item a layer."""
        cache_layers = [
            CacheLayer(layer, kind, kinds[kind], spec.num_slots, scratch, device)
            for layer, kind, scratch in zip(layers, kind_of, scratches, strict=True)
        ]
        if spec.policy.leading_layer is not None:
            leader, *led = [layer for layer in cache_layers if layer.kind.sliding_window is None][
                spec.policy.leading_layer :
            ]
            for layer in led:
                layer.leader = leader
        cache = ModelCache(cache_layers, kernels)
        return cls(spec, tuple(kinds), cache, Sampler(spec.num_slots, vocab_size, device, kernels))

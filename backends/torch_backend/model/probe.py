"""Finds the cache that a model's layers need, by recording one forward pass.

A configuration can omit things. The tensors that each layer passes to its cache and its attention decide
whether slots can store its keys and values, or its latents, and how wide they are.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.torch_backend.errors import UnsupportedModelError
from backends.torch_backend.model.attention import AttentionOptions
from backends.torch_backend.model.recurrent import Mix, RowStates
from cache.slots import PlaneSpec, StateSpec

# What configurations call layers that neither attend nor have a state.
_STATELESS = frozenset({"mlp", "moe"})


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer stores: keys and values, states, both, or nothing. The numbers of heads may be 0."""

    num_heads: int
    num_kv_heads: int
    planes: tuple[PlaneSpec, ...]  # keys and values, or latents; none if it does not attend
    sliding_window: int | None  # tokens that a query sees, its own included; None: all
    readers: tuple[int, ...] = ()  # later layers that store nothing, and attend to what this one stores
    states: tuple[StateSpec, ...] = ()

    @property
    def attends(self) -> bool:
        return self.num_kv_heads > 0


def probe_layers(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Return the specs of the model's layers, but for those at its end that attend to what others store.

    The mixers of recurrent layers must have been replaced. Raises UnsupportedModelError for a layer that does
    not call its cache and its attention once each, unless it attends to what an earlier layer stored, has a
    state, or is known to store nothing.
    """
    name = type(model).__name__
    probe, logits = _watched_pass(model, has_positions=True)
    vocab_size = model.config.vocab_size
    if logits.shape != (1, 1, vocab_size):
        raise UnsupportedModelError(
            f"{name} returns logits of shape {tuple(logits.shape)}, expected (1, 1, {vocab_size})"
        )
    kinds = getattr(model.config, "layer_types", None) or ()
    stateless = {layer for layer, kind in enumerate(kinds) if kind in _STATELESS}
    specs = probe.specs(name, stateless)
    if not any(spec.attends for spec in specs):
        raise UnsupportedModelError(f"no layer of {name} attends: slots are made for keys and values")
    other_probe, other_logits = _watched_pass(model, has_positions=False)
    # A model on the meta device has no numbers to compare.
    if not logits.is_meta and not (
        torch.allclose(logits, other_logits, equal_nan=True) and probe.saw_the_same(other_probe)
    ):
        raise UnsupportedModelError(f"{name} does not count its tokens' positions from 0")
    _check_windows(model, specs)
    return specs


def _watched_pass(model: PreTrainedModel, *, has_positions: bool) -> tuple["_ProbeCache", Tensor]:
    """Run two tokens, with their positions unless the model is to count them.

    Returns what the layers passed, and the last logits. Raises UnsupportedModelError.
    """
    name = type(model).__name__
    probe = _ProbeCache(model.config.num_hidden_layers)
    # The token must not be padding, which some models do not count.
    token = int(model.config.pad_token_id == 0)
    ids = torch.full((1, 2), token, device=model.device)
    positions = torch.arange(2, device=model.device)[None] if has_positions else None
    try:
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=ids,
                position_ids=positions,
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
    return probe, logits


def _check_windows(model: PreTrainedModel, specs: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedModelError for a layer whose window only the model's own mask would show."""
    kinds = getattr(model.config, "layer_types", None) or ()
    for layer, (kind, spec) in enumerate(zip(kinds, specs, strict=False)):
        if kind == "sliding_attention" and spec.sliding_window is None:
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} has a sliding window, and does not pass it on"
            )


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
        self._states: list[tuple[StateSpec, ...]] = [()] * num_layers

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:
        states = RowStates()
        output = mixer(hidden, states)
        self._states[layer] = tuple(StateSpec(tuple(each.shape[1:]), each.dtype) for each in states.tensors)
        return output

    def store(self, layer: int, latents: Tensor) -> Tensor:
        self._probes[layer].written.append((latents,))
        return latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self._seen[layer].append((query, key, value, options.sliding_window))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def saw_the_same(self, other: "_ProbeCache") -> bool:
        """Return whether the layers attended with the same queries, which have the positions in them."""
        return all(
            torch.allclose(query, other_query, equal_nan=True)
            for seen, other_seen in zip(self._seen, other._seen, strict=True)
            for (query, *_), (other_query, *_) in zip(seen, other_seen, strict=True)
        )

    def specs(self, name: str, stateless: AbstractSet[int]) -> tuple[LayerSpec, ...]:
        """Return the layers' specs. Layers of `stateless` may call nothing. Raises UnsupportedModelError."""
        sources = [self._source(layer) for layer in range(len(self._probes))]
        num_storing = len(sources) - sum(source is not None for source in sources)
        readers: list[list[int]] = [[] for _ in range(num_storing)]
        for layer, source in enumerate(sources[num_storing:], num_storing):
            if source is None:
                raise UnsupportedModelError(
                    f"layer {layer} of {name} stores keys after layers that store none"
                )
            readers[source].append(layer)
        specs = [self._spec(layer, name, stateless) for layer in range(num_storing)]
        return tuple(
            replace(spec, readers=tuple(reading)) for spec, reading in zip(specs, readers, strict=True)
        )

    def _source(self, layer: int) -> int | None:
        """Return the earlier layer to whose keys and values a layer attends; None if it stores its own."""
        if self._probes[layer].written or len(self._seen[layer]) != 1:
            return None
        _, key, value, window = self._seen[layer][0]
        for earlier in range(layer):
            for written, seen in zip(self._probes[earlier].written, self._seen[earlier], strict=False):
                if key is written[0] and value is written[-1] and window == seen[3]:
                    return earlier
        return None

    def _spec(self, layer: int, name: str, stateless: AbstractSet[int]) -> LayerSpec:
        written = self._probes[layer].written
        seen = self._seen[layer]
        states = self._states[layer]
        if not written and not seen and (states or layer in stateless):
            return LayerSpec(0, 0, (), None, states=states)
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
        return LayerSpec(query.shape[1], held[0].shape[1], planes, sliding_window, states=states)

"""What a torch backend can do with a model, as the scheduler will see it."""

from collections.abc import Sequence
from itertools import count

from transformers import PreTrainedConfig

from backends.interface import BackendSpec, Feature, PrefillShape, ScratchSpec, SlotPoolSpec
from backends.torch_backend.config import DEFAULT_MAX_MODEL_LEN, TorchBackendConfig
from backends.torch_backend.forward.cache import LayerKind
from backends.torch_backend.model.induction import LookUp
from backends.torch_backend.model.probe import LayerSpec
from cache.policy import CachePolicy, streaming_llm
from cache.pool_options import PoolOptions
from cache.scratch import ScratchLayout

MAX_DECODE_STEPS = 8


def resolve_max_model_len(config: TorchBackendConfig, model: PreTrainedConfig) -> int:
    """Return the longest sequence. Raises ValueError when more is asked for than the model was made for."""
    limit: int = model.max_position_embeddings
    if config.max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's max_position_embeddings of {limit}"
        )
    return config.max_model_len


def most_slot_entries(
    policies: Sequence[CachePolicy], max_model_len: int, scratch_capacity: int | None
) -> int:
    """Return what the longest sequence has use for or, where prompts outgrow their scratch, what this can fill."""
    if scratch_capacity is None or scratch_capacity >= max_model_len:
        return max_model_len
    return scratch_capacity - max(
        (policy.scorer.observation_window for policy in policies if policy.scorer is not None), default=1
    )


def with_layer_budgets(
    policy: CachePolicy,
    layers: Sequence[LayerSpec],
    measured: Sequence[LookUp],
    max_model_len: int,
    most_entries: int,
    *,
    leads: bool,
) -> CachePolicy:
    """Return the policy with its kept entries shared out between the layers without a sliding window; `measured` are all layers.

    No layer's slot gets more than `most_entries`, unless an equal share is more. With `leads`, the layer that looks up most leads those
    behind it.
    """
    most = most_entries - policy.layout.num_sink - policy.layout.num_recent
    windows = _windows(layers, max_model_len)
    own = [look_up for look_up, window in zip(measured, windows, strict=True) if window is None]
    leading_layer = max(range(len(own)), key=lambda number: own[number].found) if leads and own else None
    return policy.with_layer_scores([look_up.score for look_up in own], most, leading_layer)


def layer_kinds(
    policy: CachePolicy, layers: Sequence[LayerSpec], max_model_len: int
) -> tuple[list[LayerKind], list[int]]:
    """Return the kinds of layers there are under a policy, and each layer's kind.

    A sliding window is a slot without sinks and kept entries, of just that length.
    """
    number, of_layers = count(), list[LayerKind]()
    for window in _windows(layers, max_model_len):
        of_layers.append(
            LayerKind(policy.of_layer(next(number)) if window is None else streaming_llm(0, window), window)
        )
    kinds = list(dict.fromkeys(of_layers))
    return kinds, [kinds.index(kind) for kind in of_layers]


def _windows(layers: Sequence[LayerSpec], max_model_len: int) -> list[int | None]:
    """Return the layers' sliding windows. One that no sequence can outgrow is no window at all."""
    return [
        None
        if layer.sliding_window is None or layer.sliding_window >= max_model_len
        else layer.sliding_window
        for layer in layers
    ]


def prefill_shapes(config: TorchBackendConfig, max_model_len: int) -> tuple[PrefillShape, ...]:
    """Return few shapes of at most the chunk's tokens: one long chunk, or several short ones, or one shorter one alone.

    One chunk alone is as long as that, or half, and so on down to a sixteenth: behind a long context, the next smaller one still fits the
    time that live sequences may wait, and small ones are read at a lower rate (with steps of four: 0.76 of the tokens/s).
    """
    num_tokens = min(config.prefill_chunk, max_model_len)
    shapes = {PrefillShape(1, num_tokens // part) for part in (1, 2, 4, 8, 16) if num_tokens >= part}
    shapes |= {PrefillShape(min(part, 8), num_tokens // part) for part in (4, 16) if num_tokens >= part}
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows)))


def scratch_layout(
    capacity: int | None, max_model_len: int, chunk: int, kinds: Sequence[LayerKind]
) -> ScratchLayout:
    """Return the layout of scratches of `capacity` entries. Raises ValueError when that is too few to fill the slots from.

    Half is given up at a time, in whole chunks where it is more than one, or all but what stays anyway if that is less, but as many as are
    read ahead at least. At the prompt's end the scratch is full again, so that it holds as many as any slot.
    """
    if capacity is None or capacity >= max_model_len:
        return ScratchLayout(max_model_len)
    if any(not kind.policy.evicts and kind.policy.scorer is None for kind in kinds):
        raise ValueError("scratch_capacity is not an option of policy full, which gives nothing up")
    num_needed = max(kind.policy.layout.capacity for kind in kinds)
    num_fixed = max(
        kind.policy.layout.num_sink + kind.policy.prompt_window - kind.policy.num_lent for kind in kinds
    )
    num_ahead = max(
        (kind.chooser.observation_window for kind in kinds if kind.chooser is not None), default=1
    )
    least = max(num_needed + num_ahead, num_fixed + 2 * num_ahead - 1, 2 * num_ahead)
    if capacity < least:
        raise ValueError(
            f"scratch_capacity must be at least {least} for slots of {num_needed} entries, got {capacity}"
        )
    num_dropped = min(capacity // 2, capacity - num_fixed)
    if num_dropped > chunk:
        num_dropped = max(num_dropped - num_dropped % chunk, num_ahead)
    return ScratchLayout(capacity, num_dropped, num_ahead)


def pool_spec(
    options: PoolOptions, policy: CachePolicy, kinds: Sequence[LayerKind], max_model_len: int
) -> SlotPoolSpec:
    """Return the limits of a pool whose layers are of these kinds."""
    max_direct_tokens = min(
        min(kind.policy.max_direct_tokens for kind in kinds), policy.max_direct_tokens, max_model_len
    )
    return SlotPoolSpec(options.num_slots, policy, max_direct_tokens, options.label)


def backend_spec(
    config: TorchBackendConfig,
    model: PreTrainedConfig,
    max_model_len: int,
    pools: tuple[SlotPoolSpec, ...],
    scratch: ScratchSpec,
) -> BackendSpec:
    """Return the limits of a backend with these pools and scratches."""
    return BackendSpec(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        pools=pools,
        scratch=scratch,
        prefill_shapes=prefill_shapes(config, max_model_len),
        features=frozenset(Feature),
        max_decode_steps=MAX_DECODE_STEPS,
        embedding_size=model.hidden_size,
    )

"""The limits of a torch backend for a given model, as the scheduler will see them."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from backends.config import prefill_shapes
from backends.interface import BackendSpec, Feature, PrefixSpec, ScratchSpec, SlotPoolSpec
from backends.torch_backend.config import TorchBackendConfig
from backends.torch_backend.forward.step import LayerKind
from backends.torch_backend.model.induction import InductionScore
from backends.torch_backend.model.lengths import longest_sequence
from backends.torch_backend.model.probe import LayerSpec
from cache.policy import CachePolicy, held_window, streaming_llm
from cache.pool_options import PoolOptions
from cache.scratch import ScratchLayout

MAX_DECODE_STEPS = 8


def resolve_max_model_len(config: TorchBackendConfig, model: PreTrainedConfig) -> int:
    """Return the longest sequence: as configured, or the model's own limit, whether or not it fits in memory.

    Raises ValueError when a model that answers was made for shorter ones.
    """
    limit = longest_sequence(model)
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit and config.is_draft:
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len {config.max_model_len} exceeds the model's longest sequence of {limit} tokens"
        )
    return config.max_model_len


def most_slot_entries(
    policies: Sequence[CachePolicy], max_model_len: int, scratch_capacity: int | None
) -> int:
    """Return the most entries that a slot can fill from the longest sequence or from an evicting scratch."""
    if scratch_capacity is None or scratch_capacity >= max_model_len:
        return max_model_len
    windows = [held_window(policy.scorer) for policy in policies if policy.scorer is not None]
    return scratch_capacity - max(windows, default=1)


def with_layer_budgets(
    policy: CachePolicy,
    layers: Sequence[LayerSpec],
    measured: Sequence[InductionScore],
    max_model_len: int,
    most_entries: int,
    *,
    has_leader: bool,
) -> CachePolicy:
    """Return the policy with its kept entries shared out by the layers' induction scores.

    `layers` and `measured` are all layers; those with a sliding window keep nothing, and some have no
    entries. No layer's slot gets more than `most_entries`, unless an equal share is more. With `has_leader`,
    the layer with the most induction leads those after it.
    """
    most_kept = most_entries - policy.layout.num_sink - policy.layout.num_recent
    scores = [
        score
        for score, layer, window in zip(measured, layers, _windows(layers, max_model_len), strict=True)
        if layer.attends and window is None
    ]
    leading_layer = None
    if has_leader and scores:
        leading_layer = max(range(len(scores)), key=lambda index: scores[index].matched)
    return policy.with_layer_scores([score.total for score in scores], most_kept, leading_layer)


def layer_kinds(
    policy: CachePolicy, layers: Sequence[LayerSpec], max_model_len: int
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer under a policy.

    A layer with a sliding window has a slot without sinks and kept entries, whose ring is the window. A layer
    without entries has the kind of the attending layer before it, or of the first one.
    """
    kinds: list[LayerKind] = []
    num_full = 0  # layers without a window so far: a policy counts only these
    num_leading = 0  # layers before the first one that attends
    for layer, window in zip(layers, _windows(layers, max_model_len), strict=True):
        if not layer.attends:
            if kinds:
                kinds.append(kinds[-1])
            else:
                num_leading += 1
        elif window is None:
            kinds.append(LayerKind(policy.of_layer(num_full), None))
            num_full += 1
        else:
            kinds.append(LayerKind(streaming_llm(0, window), window))
    return tuple(kinds[:1] * num_leading + kinds)


def _windows(layers: Sequence[LayerSpec], max_model_len: int) -> list[int | None]:
    """Return the layers' sliding windows; None for one that no sequence outgrows."""
    return [
        None
        if layer.sliding_window is None or layer.sliding_window >= max_model_len
        else layer.sliding_window
        for layer in layers
    ]


def scratch_layout(
    capacity: int | None, max_model_len: int, chunk: int, kinds: Sequence[LayerKind]
) -> ScratchLayout:
    """Return the layout of scratches of `capacity` entries.

    Raises ValueError if a slot could not be filled from a scratch of that capacity.

    Half of the entries are evicted at a time, in whole chunks where that is more than one. It is less where
    sinks and window take more than half, and at least as many as are read ahead. At the prompt's end the
    scratch is full again, so that it holds as many tokens as any slot.
    """
    scorers = [kind.scorer for kind in kinds if kind.scorer is not None]
    num_echoed = max((scorer.num_echoed for scorer in scorers), default=0)
    if capacity is None or capacity >= max_model_len:
        return ScratchLayout(max_model_len, num_echoed=num_echoed)
    for kind in kinds:
        if not kind.policy.evicts and kind.policy.scorer is None:
            raise ValueError(
                f"scratch_capacity is not an option of policy {kind.policy.name}, which evicts nothing"
            )
    num_needed = max(kind.policy.layout.capacity for kind in kinds)
    num_fixed = max(
        kind.policy.layout.num_sink + kind.policy.prompt_window - kind.policy.num_lent for kind in kinds
    )
    num_ahead = max(map(held_window, scorers), default=1)
    # A slot must be full at the prompt's end, when the tokens read ahead were read in addition. A scratch may
    # have to evict when it holds only capacity + 1 - num_ahead tokens, and then has num_ahead candidates
    # beside the fixed ones.
    least = max(num_needed + num_ahead, num_fixed + 2 * num_ahead - 1, 2 * num_ahead)
    if capacity < least:
        raise ValueError(
            f"scratch_capacity must be at least {least} for slots of {num_needed} entries, got {capacity}"
        )
    eviction_size = min(capacity // 2, capacity - num_fixed)
    if eviction_size > chunk:
        eviction_size = max(eviction_size - eviction_size % chunk, num_ahead)
    return ScratchLayout(capacity, eviction_size, num_ahead, num_echoed)


def pool_spec(
    options: PoolOptions, policy: CachePolicy, kinds: Sequence[LayerKind], max_model_len: int
) -> SlotPoolSpec:
    """Return the limits of a pool whose layers are of these kinds."""
    windows = [kind.policy.layout.capacity for kind in kinds if kind.sliding_window is not None]
    max_exact = min([max_model_len, *windows])
    max_direct = min(max_exact, policy.max_direct_tokens)
    return SlotPoolSpec(
        options.num_slots, policy, max_direct, max_exact, options.label, options.kv_cache_dtype
    )


def backend_spec(
    config: TorchBackendConfig,
    model: PreTrainedConfig,
    max_model_len: int,
    pools: tuple[SlotPoolSpec, ...],
    scratch: ScratchSpec,
    prefixes: PrefixSpec | None,
) -> BackendSpec:
    """Return the limits of a backend with these pools, scratches and stored prefixes."""
    return BackendSpec(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        pools=pools,
        scratch=scratch,
        prefill_shapes=prefill_shapes(config.prefill_chunk, max_model_len),
        features=frozenset(Feature),
        max_decode_steps=MAX_DECODE_STEPS,
        embedding_size=model.hidden_size,
        prefixes=prefixes,
    )

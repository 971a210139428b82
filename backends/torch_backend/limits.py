"""What a torch backend can do with a model, as the scheduler will see it."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from backends.interface import BackendSpec, Feature, PrefillShape, ScratchSpec, SlotPoolSpec
from backends.torch_backend.config import DEFAULT_MAX_MODEL_LEN, TorchBackendConfig
from backends.torch_backend.model_cache import LayerKind
from backends.torch_backend.probe import LayerSpec
from cache.policy import CachePolicy, streaming_llm
from cache.pool_options import PoolOptions

MAX_DECODE_STEPS = 8


def resolve_max_model_len(config: TorchBackendConfig, model: PreTrainedConfig) -> int:
    """Return the longest sequence. Raises ValueError when more is asked for than the model was made for."""
    limit: int = model.max_position_embeddings
    if config.max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's max_position_embeddings of {limit}")
    return config.max_model_len


def layer_kinds(policy: CachePolicy, layers: Sequence[LayerSpec], max_model_len: int) -> tuple[list[LayerKind], list[int]]:
    """Return the kinds of layers there are under a policy, and each layer's kind, which is the same under all policies.

    A sliding window is a slot without sinks and kept entries, of just that length. One that no sequence can outgrow is no window at all.
    """
    windows = [None if layer.sliding_window is None or layer.sliding_window >= max_model_len else layer.sliding_window for layer in layers]
    distinct = list(dict.fromkeys(windows))
    kinds = [LayerKind(policy if window is None else streaming_llm(0, window), window) for window in distinct]
    return kinds, [distinct.index(window) for window in windows]


def prefill_shapes(config: TorchBackendConfig, max_model_len: int) -> tuple[PrefillShape, ...]:
    """Return few shapes of at most the chunk's tokens: one long chunk, or several short ones, or one short one alone."""
    num_tokens = min(config.prefill_chunk, max_model_len)
    shapes = {PrefillShape(1, num_tokens)}
    for rows in (4, 16):
        if num_tokens >= rows:
            shapes |= {PrefillShape(1, num_tokens // rows), PrefillShape(min(rows, 8), num_tokens // rows)}
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows)))


def pool_spec(options: PoolOptions, policy: CachePolicy, kinds: Sequence[LayerKind], max_model_len: int) -> SlotPoolSpec:
    """Return the limits of a pool whose layers are of these kinds."""
    max_direct_tokens = min(min(kind.policy.max_direct_tokens for kind in kinds), policy.max_direct_tokens, max_model_len)
    return SlotPoolSpec(options.num_slots, policy, max_direct_tokens, options.label)


def backend_spec(config: TorchBackendConfig, model: PreTrainedConfig, max_model_len: int, pools: tuple[SlotPoolSpec, ...]) -> BackendSpec:
    """Return the limits of a backend with these pools."""
    return BackendSpec(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        pools=pools,
        scratch=ScratchSpec(config.num_scratch, max_model_len),
        prefill_shapes=prefill_shapes(config, max_model_len),
        features=frozenset(Feature),
        max_decode_steps=MAX_DECODE_STEPS,
        embedding_size=model.hidden_size,
    )

"""What every backend is built from, and a backend that is configured and not yet loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from backends.clock import Clock, WallClock
from backends.interface import Backend, PrefillShape
from cache.policy import PolicyName
from cache.policy_options import LayerBudgets, PolicyOptions
from cache.pool_options import KVCacheDtype, PoolOptions, check_names
from cache.scorer import HeadReduction, QueryReduction, WindowScorer

DEFAULT_MAX_MODEL_LEN = 16384
DEFAULT_DISK_BYTES = 8 << 30

# How a draft's attention becomes the importance of a prompt's tokens (SpecPrefill, arXiv 2502.02789, but for
# the queries, which are the prompt's last tokens and those of the question). The prompt's own tokens, all of
# them, are the candidates, and `cache.importance` pools their votes.
DRAFT_SCORER = WindowScorer(
    observation_window=32,
    head_reduction=HeadReduction.MAXIMUM,
    query_reduction=QueryReduction.MAXIMUM,
    num_echoed=32,
)
DRAFT_POOL = PoolOptions(
    num_slots=0,
    policy=PolicyOptions(
        PolicyName.SNAPSTREAM,
        num_sink=0,
        num_recent=DRAFT_SCORER.observation_window,
        num_kept=1,
        scorer=DRAFT_SCORER,
        layer_budgets=LayerBudgets.EQUAL,
    ),
    name="draft",
)


def prefill_shapes(prefill_chunk: int, max_model_len: int) -> tuple[PrefillShape, ...]:
    """Return a few shapes of at most the chunk's tokens: one long chunk, several short or one shorter one.

    A single chunk has the full length, or half of it, and so on down to a sixteenth. Behind a long context,
    the next smaller chunk then still fits the time that live sequences may wait, and small chunks are read at
    a lower rate (with steps of four: 0.76 of the tokens/s).
    """
    num_tokens = min(prefill_chunk, max_model_len)
    shapes = {PrefillShape(1, num_tokens // part) for part in (1, 2, 4, 8, 16) if num_tokens >= part}
    shapes |= {PrefillShape(min(part, 8), num_tokens // part) for part in (4, 16) if num_tokens >= part}
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows)))


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """The model and the sizes of its cache.

    `model` is a local folder, a hub id or a GGUF file (`backends.conversion`). `max_model_len` None is the
    model's own limit, but beyond `DEFAULT_MAX_MODEL_LEN` only with `fills_memory`, as far as memory allows.
    `prefill_chunk` is the number of tokens that one prefill step reads, all rows together. `scratch_capacity`
    None means that a scratch holds any prompt. With `fills_memory`, slots of policy snapstream without a size
    are as long as fit in memory; a backend that has no memory of its own ignores it. Stored blocks of prompts
    have `prefix_cache_dtype` and take up to `prefix_cache_bytes` of host memory; None is
    `host_memory.prefix_bytes` of what is available, 0 stores none. They are also written to
    `prefix_cache_dir`, up to `prefix_cache_disk_bytes`. A draft only scores prompts for another model, and
    its `max_model_len` is cut to the model's own limit.
    """

    model: str
    pools: tuple[PoolOptions, ...] = (PoolOptions(),)
    max_model_len: int | None = None
    num_scratch: int = 2
    scratch_capacity: int | None = None
    prefill_chunk: int = 512
    fills_memory: bool = False
    prefix_cache_bytes: int | None = 0
    prefix_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int = DEFAULT_DISK_BYTES
    is_draft: bool = False

    def __post_init__(self) -> None:
        check_names(self.pools)
        for name in ("num_scratch", "prefill_chunk", "scratch_capacity", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def of_draft(self, model: str) -> "BackendConfig":
        """Return the configuration of a draft for this model."""
        return BackendConfig(
            model=model,
            pools=(DRAFT_POOL,),
            # Its tokens may be shorter, so that a prompt has more of them.
            max_model_len=self.max_model_len and max(self.max_model_len, DEFAULT_MAX_MODEL_LEN),
            fills_memory=self.fills_memory,
            num_scratch=1,
            prefill_chunk=self.prefill_chunk,
            # The bytes that are configured are those of the model that answers.
            prefix_cache_bytes=None if self.prefix_cache_bytes != 0 else 0,
            is_draft=True,
        )


Config = TypeVar("Config", bound=BackendConfig)


@dataclass(frozen=True, slots=True)
class ConfiguredBackend(Generic[Config]):
    """A backend before its model is loaded.

    `create` takes the configuration, the clock that the scheduler uses too, and the size of the tokenizer's
    vocabulary; it blocks while the model is loaded. `simulation` describes what is simulated, for people;
    None means that nothing is. Simulated time passes `time_scale` times as fast as the wall clock's.
    """

    config: Config
    create: Callable[[Config, Clock, int], Backend]
    make_clock: Callable[[], Clock] = WallClock
    time_scale: float = 1.0
    simulation: str | None = None

    def load(self, clock: Clock, vocab_size: int) -> Backend:
        return self.create(self.config, clock, vocab_size)

"""The messages between the server's event loop and the engine's thread: frozen, without tensors or text."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, TypeAlias

from backends.interface import Importance, KeptTokens, PromptPooling, SampledToken, SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended. Clients see the first two. The others become errors or nothing."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client disconnected, or the server shuts down
    REJECTED = "rejected"  # its grammar cannot be followed
    QUEUE_FULL = "queue_full"  # the waiting queue has no room at the moment
    QUEUE_TIMEOUT = "queue_timeout"  # the deadline for its admission passed
    TIMEOUT = "timeout"  # its total deadline passed
    ERROR = "error"  # a step or the engine failed


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When to stop: at a token id of `stop_token_ids` (not before `min_tokens`) or after `max_tokens`."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Add:
    """A new request, of `num_choices` sequences. Each ends with exactly one final `EngineOutput`.

    Prefill reads the first `num_prefill_tokens` tokens (None: all) and packs them into the slot. The rest of
    the prompt takes decode steps. These tokens are called forced, and their log-probabilities are computed
    from the slot.

    `question_token_ids` are the beginning of the question, for policies that read it again behind a long
    prompt. Without them, the prompt's own beginning is. A vote of theirs on what is kept counts
    `question_weight` of that of the prompt's last token.

    `prediction_token_ids` are a guess of the answer, or of parts of it. It changes speed alone.

    `stop.max_tokens` 0 means that the prompt is only scored, or pooled. With `importance`, it is for a
    draft's pool. The request that follows it takes over its `turn`, the place in the queue.

    Timeouts are seconds from `arrival_time`, which is by the engine's clock. In a queue ordered by priority,
    lower `priority` values go first. A fair queue is fair between tenants.

    A background request goes after all others, in every queue order. It holds at most a share of the slots
    (`SchedulerConfig.max_background_slots`), and does not count towards `SchedulerConfig.max_num_waiting`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopCriteria
    arrival_time: float
    num_choices: int = 1
    priority: int = 0
    queue_timeout: float | None = None
    timeout: float | None = None
    num_prompt_logprobs: int | None = None  # None: no log-probabilities of the prompt
    num_prefill_tokens: int | None = None
    question_token_ids: tuple[int, ...] = ()
    question_weight: float = 1.0
    prediction_token_ids: tuple[int, ...] = ()
    pooling: PromptPooling | None = None  # how the prompt's hidden states become one vector; None: no vector
    importance: Importance | None = None  # a draft measures that of the prompt's chunks
    returns_kept: bool = False  # choice 0 reports which tokens of the prompt its slot holds after prefill
    pool: int = 0  # index of the pool whose slots it takes
    turn: int | None = None  # None: behind all that have come before
    requires_exact: bool = False  # refuse the request if the slot could lose a token of its sequence
    grammar: str | None = None  # of the answer, in the form that `scheduler.constraints.Constraints` reads
    is_background: bool = False
    tenant: str = ""  # an opaque name
    cache_salt: str = ""  # only prompts with the same salt share stored blocks

    @property
    def num_forced_tokens(self) -> int:
        """How many tokens of the prompt are read by decode, which yields them instead of sampling."""
        return 0 if self.num_prefill_tokens is None else len(self.prompt_token_ids) - self.num_prefill_tokens

    @property
    def needs_slot(self) -> bool:
        """False for a prompt that prefill alone scores or pools."""
        return self.stop.max_tokens > 0 or self.num_forced_tokens > 0

    @property
    def queue_deadline(self) -> float | None:
        """The latest time of its admission, by the engine's clock."""
        return None if self.queue_timeout is None else self.arrival_time + self.queue_timeout

    @property
    def deadline(self) -> float | None:
        """The latest time of its end, by the engine's clock."""
        return None if self.timeout is None else self.arrival_time + self.timeout


AdmittedAdd = NewType("AdmittedAdd", Add)
"""A request that `scheduler.admission.admit` has checked.

The scheduler accepts no other type and does not check again.
"""


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string ended a choice: its answer is its first `num_tokens` tokens.

    Those beyond are discarded.
    """

    request_id: str
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The client no longer waits for this request's choices."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ServedElsewhere:
    """Weighted tokens that other replicas have served, by tenant. They count in the queue's order."""

    num_weighted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ResetPrefixes:
    """Forget all stored blocks of prompts."""


@dataclass(frozen=True, slots=True)
class WatchSlots:
    """Begin or end to report the held slots with each step, at once with the next one."""

    is_watched: bool


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine: every open choice gets a final output, then the loop returns."""


EngineInput: TypeAlias = (
    AdmittedAdd | Finish | Abort | ServedElsewhere | ResetPrefixes | WatchSlots | Shutdown
)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of a sequence's slot at its end, in entries of a full-attention layer.

    The numbers follow from the slot's layout; they are not measured.
    """

    num_prompt_tokens: int  # read by prefill
    num_tokens: int  # written into the cache over the sequence's life
    num_live: int  # entries still held
    num_evicted: int  # tokens no longer held
    num_ring_wraps: int  # times that the ring started to overwrite itself
    num_quantized: int = 0  # of the entries still held: those in 4 bits

    @property
    def compression(self) -> float:
        """Tokens written for each entry held: 1 when nothing was evicted."""
        return self.num_tokens / self.num_live if self.num_live else 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of a sequence's life, in seconds by the engine's clock. None: it did not happen."""

    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class Final:
    """The end of one sequence."""

    reason: FinishReason
    timing: Timing
    num_prompt_tokens: int
    num_output_tokens: int  # with the stop token, which is in no output's `tokens`
    num_packed_prompt_tokens: int = 0  # prompt tokens whose log-probabilities were computed from the slot
    num_cached_tokens: int = 0  # of the prompt, restored from stored blocks instead of read
    num_prefill_output_tokens: int = 0  # 1 if prefill, not decode, sampled the first token of the output
    num_discarded_tokens: int = 0  # generated beyond the end, never counted in usage
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of these, those that were drawn
    cache: CacheUse | None = None  # None when no slot ever held the whole prompt
    stop_token_id: int | None = None
    turn: int | None = None  # its place in the queue; None if it was not queued
    message: str | None = None  # for the reasons that are errors: the cause, with the numbers


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The progress of one choice since its previous output.

    The first one says that the request was accepted, or is final.
    """

    request_id: str
    choice: int
    tokens: tuple[SampledToken, ...] = ()
    num_computed_prompt_tokens: int = 0  # prompt tokens read so far
    prompt_logprobs: tuple[SampledToken, ...] = ()  # of choice 0: all of them, once the prompt is read
    embedding: tuple[float, ...] = ()  # of a pooled prompt, with its final output
    importance: tuple[float, ...] = ()  # of a prompt's chunks, with its final output
    kept: KeptTokens | None = None  # of choice 0, once, if it was requested
    final: Final | None = None

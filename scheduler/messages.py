"""What crosses the line between the server's event loop and the engine's thread: frozen, without tensors and without text."""

import enum
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

from backends.interface import PromptPooling, SampledToken, SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended. The first two are the client's to see; the others become errors or nothing."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client went away, or the server ends
    REJECTED = "rejected"  # its grammar cannot be followed
    QUEUE_FULL = "queue_full"  # no place in the waiting queue just now
    QUEUE_TIMEOUT = "queue_timeout"  # its deadline for being admitted passed
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
    """A new request. It has `num_choices` sequences, each of which ends with exactly one final `EngineOutput`.

    After `num_prefill_tokens` tokens (None: all) the prompt counts as read: its slot is filled then, and the rest of the prompt takes
    decode steps, whose log-probabilities are what the slot makes of them.
    `stop.max_tokens` 0 means that the prompt is only scored, or pooled. Deadlines are seconds from `arrival_time`, which is by the
    engine's clock. Lower `priority` values go first, if the queue's order is by priority; if it is fair, it is so between tenants. What
    runs in the background goes after all else, whatever the queue's order, and takes nobody's place: it holds a share of the slots only
    (`SchedulerConfig.max_background_slots`) and is not counted among those that wait.
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
    num_prompt_logprobs: int | None = None  # None: not asked
    num_prefill_tokens: int | None = None
    pooling: PromptPooling | None = None  # the prompt's hidden states are asked for, as one vector
    pool: int = 0  # whose slots it takes, by number
    grammar: str | None = None  # what the answer must follow, as `scheduler.constraints.Constraints` reads it
    is_background: bool = False
    tenant: str = ""  # whom it is for: an opaque name

    @property
    def num_forced_tokens(self) -> int:
        """How many tokens of the prompt are left to decode, which yields them instead of choosing."""
        return 0 if self.num_prefill_tokens is None else len(self.prompt_token_ids) - self.num_prefill_tokens

    @property
    def needs_slot(self) -> bool:
        """False for what prefill alone scores."""
        return self.stop.max_tokens > 0 or self.num_forced_tokens > 0

    @property
    def queue_deadline(self) -> float | None:
        """When it must have been admitted, by the engine's clock."""
        return None if self.queue_timeout is None else self.arrival_time + self.queue_timeout

    @property
    def deadline(self) -> float | None:
        """When it must have ended, by the engine's clock."""
        return None if self.timeout is None else self.arrival_time + self.timeout


AdmittedAdd = NewType("AdmittedAdd", Add)
"""A request that `scheduler.admission.admit` has checked: the scheduler takes no other and does not check again."""


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string ended a choice: its answer is its first `num_tokens` tokens, whatever was made beyond them is discarded."""

    request_id: str
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request's choices any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The engine ends: every open choice gets a final output, then the loop returns."""


EngineInput: TypeAlias = AdmittedAdd | Finish | Abort | Shutdown


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a sequence's slot held at its end, in entries of a full-attention layer: integers of the layout, not measured."""

    num_prompt_tokens: int  # that prefill read
    num_tokens: int  # written into the cache over the sequence's life
    num_live: int  # entries still held
    num_evicted: int  # tokens no longer held
    num_ring_wraps: int  # times that the ring started to overwrite itself

    @property
    def compression(self) -> float:
        """Tokens written for each entry held: 1 when nothing was lost."""
        return self.num_tokens / self.num_live if self.num_live else 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of a sequence's life in seconds by the engine's clock; None for what did not happen."""

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
    num_output_tokens: int  # with the stop token, which is not among any output's `tokens`
    num_packed_prompt_tokens: int = 0  # tokens of the prompt whose log-probabilities were read from the slot
    num_prefill_output_tokens: int = 0  # 1 if prefill, and not the slot, chose the first token of the output
    num_discarded_tokens: int = 0  # made by the device beyond the end, never counted in usage
    cache: CacheUse | None = None  # None when no slot ever held the whole prompt
    stop_token_id: int | None = None
    message: str | None = None  # for the reasons that are errors: what was wrong, with the numbers


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """News of one choice of a request, in order. The first one says that the request was accepted (or is already final)."""

    request_id: str
    choice: int
    tokens: tuple[SampledToken, ...] = ()
    num_computed_prompt_tokens: int = 0  # progress of reading the prompt
    prompt_logprobs: tuple[SampledToken, ...] = field(
        default=()
    )  # with choice 0, complete, once the prompt is read
    embedding: tuple[float, ...] = ()  # with the end of a prompt that was pooled
    final: Final | None = None

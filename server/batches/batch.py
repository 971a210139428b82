"""A batch as it is written down: what was asked for, in which state it is, and since when. Its answers are in its `Journal`."""

import enum
import secrets
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

COMPLETION_WINDOW: Final = 24 * 3600  # seconds


class BatchStatus(enum.StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # its input is at fault; nothing was run
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # nothing more is run; its files are being made
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"  # nothing more is run; its files are being made
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)

    @property
    def may_run(self) -> bool:
        return self in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with the input, or with a line of it, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines: of the input, answered with success, and answered with an error or not at all."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all answers together."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Usage":
        """Return what a line of an output or error file cost, by whichever names its endpoint tells it."""
        told = ((answer.get("response") or {}).get("body") or {}).get("usage") or {}
        read, made = ("prompt", "completion") if "prompt_tokens" in told else ("input", "output")
        return cls(
            told.get(f"{read}_tokens", 0),
            (told.get(f"{read}_tokens_details") or {}).get("cached_tokens", 0),
            told.get(f"{made}_tokens", 0),
            (told.get(f"{made}_tokens_details") or {}).get("reasoning_tokens", 0),
        )

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Times are Unix seconds.

    Once it `is_sealed`, its journal is complete, and its counts, its usage and the ids of the files that it will have stand: what a crash
    interrupts then is done again with the same outcome.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    output_lifetime: int  # seconds
    created_at: float
    expires_at: float
    status: BatchStatus = BatchStatus.VALIDATING
    times: Mapping[BatchStatus, float] = field(default_factory=dict)  # when it came into each state
    ending: BatchStatus = BatchStatus.COMPLETED  # the state in which it ends, once it is being finalized
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    counts: Counts = Counts()
    usage: Usage = Usage()
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_sealed: bool = False

    def entered(self, status: BatchStatus, now: float) -> "Batch":
        """Return it in another state."""
        return replace(self, status=status, times={**self.times, status: now})


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"

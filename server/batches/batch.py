"""A batch's stored record: its request, its state and the times of its states.

The batch's answers are in its `Journal`.
"""

import enum
import secrets
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final

COMPLETION_WINDOW: Final = 24 * 3600  # seconds


class BatchStatus(enum.StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # the input has errors; no line was run
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # no more lines are run; the output files are being made
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"  # as `FINALIZING`, but the batch ends as `CANCELLED`
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)

    @property
    def may_run(self) -> bool:
        return self in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class LineError:
    """An error in the input, or in one `line` of it. Lines are counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of lines."""

    total: int = 0  # of the input
    completed: int = 0  # answered with success
    failed: int = 0  # answered with an error, or expired without an answer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all answers together."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Usage":
        """Return the usage that a line of an output or error file reports; zeros if it reports none."""
        usage = ((answer.get("response") or {}).get("body") or {}).get("usage") or {}
        # The Responses endpoint uses other names than the other endpoints.
        if "prompt_tokens" in usage:
            input_name, output_name = "prompt_tokens", "completion_tokens"
        else:
            input_name, output_name = "input_tokens", "output_tokens"
        input_details = usage.get(f"{input_name}_details") or {}
        output_details = usage.get(f"{output_name}_details") or {}
        return cls(
            input_tokens=usage.get(input_name, 0),
            cached_tokens=input_details.get("cached_tokens", 0),
            output_tokens=usage.get(output_name, 0),
            reasoning_tokens=output_details.get("reasoning_tokens", 0),
        )

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One state of a batch. Times are Unix seconds.

    Once `is_sealed` is set, the journal is complete, and the counts, the usage and the output files' ids
    are final. A finalization that a crash interrupts is then repeated with the same outcome.
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
    times: Mapping[BatchStatus, float] = field(default_factory=dict)  # when it entered each state
    ending: BatchStatus = BatchStatus.COMPLETED  # the state after finalization
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    counts: Counts = Counts()
    usage: Usage = Usage()
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_sealed: bool = False

    def entered(self, status: BatchStatus, now: float) -> "Batch":
        """Return the batch in state `status`, entered at `now`."""
        return replace(self, status=status, times={**self.times, status: now})


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"

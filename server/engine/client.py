"""The server's view of an engine: admission tickets, streams of outputs, health.

Routes see `EngineClient` only. The messages are frozen (`scheduler.messages`). There is no text, no HTTP and
no engine state here, so an engine in another process would be another implementation of the same methods.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from backends.interface import BackendSpec
from scheduler.messages import AdmittedAdd, EngineOutput
from scheduler.stats import SchedulerStats


class HealthStatus(enum.Enum):
    LOADING = "loading"  # the model is being loaded and warmed up
    READY = "ready"
    DRAINING = "draining"  # the server shuts down: running requests go on, new ones are refused
    STALLED = "stalled"  # there is work, and no step has ended for longer than the limit
    DEAD = "dead"  # loading failed, or the engine cannot run another step


@dataclass(frozen=True, slots=True)
class Health:
    """The engine's state. `detail` is a sentence with the reason of a state other than READY."""

    status: HealthStatus
    detail: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether to keep the process. False once only a restart can help."""
        return self.status not in (HealthStatus.STALLED, HealthStatus.DEAD)

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests and serves them without delay."""
        return self.status is HealthStatus.READY


class QueueFullError(Exception):
    """The slots and the queue are full, or a tenant's share of them. The client may soon try again (429)."""

    def __init__(self, num_sequences: int, num_held: int, limit: int) -> None:
        super().__init__(
            f"{num_sequences} more sequences do not fit: {num_held} of at most {limit} are admitted"
        )
        self.num_sequences = num_sequences
        self.num_held = num_held
        self.limit = limit


class UnavailableError(Exception):
    """The engine is loading, draining or dead (503)."""

    def __init__(self, health: Health) -> None:
        super().__init__(health.detail or f"the engine is {health.status.value}")
        self.health = health


class Ticket(Protocol):
    """The admission of some sequences, from before any work is done for them until their end.

    A context manager that releases the ticket.
    """

    def release(self) -> None:
        """Release the sequences. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EngineClient(Protocol):
    """An engine as seen from the event loop. Every method must be called there."""

    @property
    def spec(self) -> BackendSpec:
        """The backend's spec.

        Raises `UnavailableError` while the model is being loaded, or if loading failed.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """The number of sequences that were submitted and have not ended."""
        ...

    def reserve(self, num_sequences: int, tenant: str = "", *, in_background: bool = False) -> Ticket:
        """Admit sequences (choices × prompts) of a tenant, before their prompts are rendered.

        Background sequences have a separate limit. Hold the ticket until the last sequence has ended: `with
        client.reserve(n): ...`. Raises `QueueFullError`. Raises `UnavailableError` while the engine is
        loading, draining or dead, so the holder of a ticket may use `spec` and the renderer.
        """
        ...

    def submit(self, add: AdmittedAdd, receive: Callable[[EngineOutput], None]) -> None:
        """Submit a request. `receive` is called with each output, in order.

        It is called on the event loop and must not raise. The first output of a choice says that it was
        accepted, or is already final. The last one is final. A final output has no tokens: they come in a
        separate output before it, so that `finish` may still correct it. Failures of the engine are final
        outputs too.
        """
        ...

    def abandon(self, request_id: str) -> None:
        """Stop receiving a request's outputs, and end its remaining choices. Unknown ids are ignored."""
        ...

    def finish(self, request_id: str, choice: int, num_tokens: int) -> None:
        """Cut a choice at a stop string, after `num_tokens` tokens. Its final output counts only these."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request's remaining choices. Their final outputs are still received.

        Unknown ids are ignored.
        """
        ...

    def reset_prefixes(self) -> None:
        """Forget all stored prompts before the next step."""
        ...

    def health(self) -> Health:
        """Return the current state of the engine."""
        ...

    def stats(self) -> SchedulerStats | None:
        """Return the scheduler's state after the last step; None before the first."""
        ...

    def watch_slots(self, *, is_watched: bool) -> None:
        """Begin or end to report the held slots in `stats`. The last call decides."""
        ...

    def now(self) -> float:
        """Return the time by the engine's clock, in seconds: the clock of `Add.arrival_time`."""
        ...

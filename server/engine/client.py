"""The server's view of an engine: places in the queue, streams of outputs, health.

Routes see `EngineClient` only. What crosses the line is frozen (`scheduler.messages`). There is no text here, no HTTP and nothing of the
engine's own state: an engine in another process would be another implementation of the same few methods.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from backends.interface import BackendSpec
from scheduler.messages import AdmittedAdd, EngineOutput
from scheduler.stats import SlotUse


class HealthStatus(enum.Enum):
    LOADING = "loading"  # the model is being loaded and warmed up
    READY = "ready"
    DRAINING = "draining"  # the server is ending: running requests go on, new ones are refused
    STALLED = "stalled"  # work is waiting and no step has ended for longer than the limit
    DEAD = "dead"  # loading failed, or the engine cannot run another step


@dataclass(frozen=True, slots=True)
class Health:
    """How the engine is, and for the states that are not READY a sentence that says why."""

    status: HealthStatus
    detail: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether the process is worth keeping: false once it can never serve again without being restarted."""
        return self.status not in (HealthStatus.STALLED, HealthStatus.DEAD)

    @property
    def is_ready(self) -> bool:
        """Whether to send it requests."""
        return self.status is HealthStatus.READY


class QueueFullError(Exception):
    """Every slot and every place in the queue is taken, or a tenant's share of them: the client may try again soon (429)."""

    def __init__(self, num_sequences: int, num_held: int, limit: int) -> None:
        super().__init__(f"{num_sequences} more sequences do not fit: {num_held} of {limit} places are taken")
        self.num_sequences, self.num_held, self.limit = num_sequences, num_held, limit


class UnavailableError(Exception):
    """The engine is loading, draining or dead (503)."""

    def __init__(self, health: Health) -> None:
        super().__init__(health.detail or f"the engine is {health.status.value}")
        self.health = health


class Ticket(Protocol):
    """Places held for some sequences, from before any work is done for them until their end. A context manager that releases."""

    def release(self) -> None:
        """Give the places back. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class EngineClient(Protocol):
    """An engine, as seen from the event loop. Every method must be called there."""

    @property
    def spec(self) -> BackendSpec:
        """What the backend can do. Raises `UnavailableError` while it is loading, or if loading failed."""
        ...

    def reserve(self, num_sequences: int, tenant: str = "", *, in_background: bool = False) -> Ticket:
        """Take a place for each of these sequences (choices × prompts) of a tenant, before any rendering. The background has places apart.

        Hold the ticket until the last of them has ended: `with client.reserve(n): ...`. Raises `QueueFullError`; raises `UnavailableError`
        while the engine is loading, draining or dead, so that whoever has a ticket may use `spec` and the renderer.
        """
        ...

    def submit(self, add: AdmittedAdd, receive: Callable[[EngineOutput], None]) -> None:
        """Hand a request in. `receive` is called on the event loop with each output, in order, and must not raise.

        The first output of a choice says that it was accepted, or is already final; the last one is final. A
        final output has no tokens: they come before it, in an output of their own, so that `finish` may still
        correct it. Failures of the engine are final outputs too.
        """
        ...

    def abandon(self, request_id: str) -> None:
        """Stop receiving a request's outputs, and end its remaining choices. Unknown ids are ignored."""
        ...

    def finish(self, request_id: str, choice: int, num_tokens: int) -> None:
        """Say that a stop string ended a choice: its answer is its first `num_tokens` tokens, and its final output will say so."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request's remaining choices; their final outputs still come. Unknown ids are ignored."""
        ...

    def health(self) -> Health:
        """Return the state of the engine at this moment."""
        ...

    def slots(self) -> tuple[SlotUse, ...]:
        """Return the slots that are held, as of the last step; nothing unless `SchedulerConfig.reports_slots`."""
        ...

    def now(self) -> float:
        """Return the time by the engine's clock, in seconds: what `Add.arrival_time` is measured in."""
        ...

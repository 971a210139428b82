"""What is known of one HTTP request: put together while it is answered, by whoever learns it, and read by what tells of requests."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from scheduler.messages import Final

_KEY = "snapserve.record"


class Quota(Protocol):
    """What a request may take from the limits of its key."""

    def admit(self) -> None:
        """Count the request. Raises `ApiError`."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Reserve tokens until the request's end. Raises `ApiError`."""
        ...

    def settle(self) -> None:
        """The request has ended: what it used is known."""
        ...


class NoQuota:
    """Whatever is asked for, it may be had."""

    def admit(self) -> None: ...

    def reserve(self, num_tokens: int) -> None: ...

    def settle(self) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """One request. `tenant` is a name for the API key that says nothing of the key, and empty where there are no keys."""

    request_id: str
    tenant: str = ""
    is_background: bool = False  # sent by the server itself, to be answered behind all others
    quota: Quota = field(default_factory=NoQuota)
    headers: dict[str, str] = field(
        default_factory=dict
    )  # to be sent with the answer, whatever becomes of it
    num_prompt_tokens: int = 0  # that the engine accepted
    num_output_tokens: int = 0  # made and taken so far
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    finals: list[Final] = field(default_factory=list)  # of the sequences that ended well
    _is_detached: bool = False
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """Return the record of the request that this scope is about; one that the server sends to itself may begin without."""
        if _KEY not in scope:
            cls(uuid.uuid4().hex).attach(scope)
        record = scope[_KEY]
        assert isinstance(record, cls)
        return record

    def detach(self) -> None:
        """The request's work goes on when it was answered; whoever does it calls `end`."""
        self._is_detached = True

    def end(self) -> None:
        """The work of a request that was answered before it has ended."""
        self._is_detached = False
        for tell in self._at_end:
            tell()

    def when_done(self, tell: Callable[[], None]) -> None:
        """The request was answered: call this once its work has ended too, which is mostly now."""
        if self._is_detached:
            self._at_end.append(tell)
        else:
            tell()

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

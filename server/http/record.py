"""The record of one HTTP request, and the middleware that starts it.

Middleware and handlers fill the record while the request is served. The access log, metrics and traces read
it.
"""

import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.messages import Final
from server.logs import request_id

_KEY = "snapserve.record"

# The tenant of the current request, as in its record.
tenant: ContextVar[str] = ContextVar("tenant", default="")


class Quota(Protocol):
    """The share of its key's rate limits that a request uses."""

    async def admit(self) -> None:
        """Count the request. Raises `ApiError`."""
        ...

    async def reserve(self, num_tokens: int) -> None:
        """Reserve tokens until the request's end. Raises `ApiError`."""
        ...

    def settle(self) -> None:
        """Replace the reservation by the tokens that the request used, at its end."""
        ...


class NoQuota:
    """The quota of a key without rate limits."""

    async def admit(self) -> None: ...

    async def reserve(self, num_tokens: int) -> None: ...

    def settle(self) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """One request.

    `tenant` is a name for the API key that does not reveal the key; it is empty without keys.
    """

    request_id: str
    tenant: str = ""
    is_background: bool = False  # sent by the server to itself, to be served after all others
    quota: Quota = field(default_factory=NoQuota)
    headers: dict[str, str] = field(default_factory=dict)  # of the answer, also if it is an error
    num_prompt_tokens: int = 0  # that the engine accepted
    num_output_tokens: int = 0  # generated and received so far
    num_evicted_tokens: int = 0  # from the slots of sequences that ended
    ignored: list[str] = field(default_factory=list)  # parameters that changed nothing
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    finals: list[Final] = field(default_factory=list)  # of the sequences that ended without an error
    _is_detached: bool = False
    _end_callbacks: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """Return the record of a scope's request.

        Starts one for a request that the server sends to itself.
        """
        if _KEY not in scope:
            cls(uuid.uuid4().hex).attach(scope)
        record = scope[_KEY]
        assert isinstance(record, cls)
        return record

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

    def detach(self) -> None:
        """Mark that the request's work goes on after its answer. Call `end` when the work has ended."""
        self._is_detached = True

    def end(self) -> None:
        """End the work of a detached request."""
        self._is_detached = False
        for callback in self._end_callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the request's work has ended: at once, unless the request is detached."""
        if self._is_detached:
            self._end_callbacks.append(callback)
        else:
            callback()


class RequestId:
    """Middleware that starts the record of each request, and the log lines' `request_id`.

    It adds the record's headers, `x-request-id` (the client's own if it sent one), Anthropic's name for it,
    `request-id`, and `openai-processing-ms` to the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        record = RequestRecord(_client_id(scope) or uuid.uuid4().hex)
        record.attach(scope)
        request_id.set(record.request_id)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(record.headers)
                headers["x-request-id"] = headers["request-id"] = record.request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - start) * 1000))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _client_id(scope: Scope) -> str | None:
    """Return the id that the client sent, if it may be echoed and logged: printable ASCII, not too long."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and re.fullmatch(rb"[\x21-\x7e]{1,128}", value):
            return str(value, "ascii")
    return None

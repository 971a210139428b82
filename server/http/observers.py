"""Middleware that observes how requests are answered: the access log and the HTTP metrics.

Both share `SentResponse`, which `server.http.tracing` uses too. Each wraps another part of the application:
the metrics count the answers of all other middleware, and the access log sees the path that requests are
routed on.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.record import RequestRecord
from server.logs import fields

logger: Final = logging.getLogger("server.access")

_REFUSAL_KEY: Final = "snapserve.refused_with"
_CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status for a client that disconnects before the answer
_PROBES: Final = frozenset({"/health", "/ready", "/metrics"})  # logged at level debug, because there are many
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class SentResponse:
    """Wraps `send` to record the response's status and the times of its first byte and its end.

    Times are seconds by `now`.
    """

    def __init__(self, scope: Scope, send: Send, now: Callable[[], float]) -> None:
        self._scope = scope
        self._send = send
        self._now = now
        self._start = now()
        self._status: int | None = None
        self.first_byte: float | None = None  # from the request's start to the first message of the body

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self.first_byte is None:
            self.first_byte = self.elapsed
        await self._send(message)

    @property
    def status(self) -> int:
        """The status that the application or the HTTP protocol sent; 499 if the client disconnected."""
        if self._status is not None:
            return self._status
        refused_with: int = self._scope.get(_REFUSAL_KEY, _CLIENT_CLOSED_REQUEST)
        return refused_with

    @property
    def elapsed(self) -> float:
        return self._now() - self._start


def record_refusal(scope: Scope, status: int) -> None:
    """Record that the HTTP protocol answered a request in place of the application."""
    scope[_REFUSAL_KEY] = status


class AccessLog:
    """Writes one log line for each HTTP request when it was answered.

    It belongs inside the middleware that starts the record. Of a client's text, only the path and the names
    of ignored parameters are logged; of its API key, only the name.
    """

    def __init__(self, app: ASGIApp, now: Callable[[], float]) -> None:
        self._app = app
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = SentResponse(scope, send, self._now)
        try:
            await self._app(scope, receive, response)
        finally:
            record = RequestRecord.of(scope)
            logger.log(
                logging.DEBUG if scope["path"] in _PROBES else logging.INFO,
                "request",
                extra=fields(
                    method=scope["method"][:16],
                    path=scope["path"][:256],
                    status=response.status,
                    duration=round(response.elapsed, 6),
                    first_byte=None if response.first_byte is None else round(response.first_byte, 6),
                    key=record.tenant or None,
                    prompt_tokens=record.num_prompt_tokens or None,
                    output_tokens=record.num_output_tokens or None,
                    evicted_tokens=record.num_evicted_tokens or None,
                    ignored=",".join(record.ignored) or None,
                ),
            )


class HttpObserver(Protocol):
    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """A request was answered, or its client disconnected."""
        ...


class HttpMeter:
    """Reports each request's route, method, status and time.

    It wraps the whole application, so that refusals are counted.
    """

    def __init__(self, app: ASGIApp, observer: HttpObserver, now: Callable[[], float]) -> None:
        self._app = app
        self._observer = observer
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = SentResponse(scope, send, self._now)
        try:
            await self._app(scope, receive, response)
        finally:
            # Clients may send any word as a method, and any path: as labels they would make series without
            # bound.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._observer.answered(method, _route(scope), response.status, response.elapsed)


def _route(scope: Scope) -> str:
    """Return the template of the route that served the request."""
    return getattr(scope.get("route"), "path", "unmatched")

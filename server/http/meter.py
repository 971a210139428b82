"""Middleware that counts HTTP requests by route, method and status, and times them to the end of their answers."""

from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.sent_status import SentStatus

_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
)  # clients may send any word


class HttpObserver(Protocol):
    def answered(self, method: str, handler: str, status: int, seconds: float) -> None: ...


class HttpMeter:
    """Wraps the whole application, so that what other middleware refuses is counted too."""

    def __init__(self, app: ASGIApp, observer: HttpObserver, now: Callable[[], float]) -> None:
        self._app, self._observer, self._now = app, observer, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = SentStatus(scope, send), self._now()
        try:
            await self._app(scope, receive, status)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._observer.answered(method, _handler(scope), status.value, self._now() - start)


def _handler(scope: Scope) -> str:
    """Return the route's template: a path as it was sent would make as many series as there are paths."""
    route = scope.get("route")
    return getattr(route, "path", "unmatched")

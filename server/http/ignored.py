"""The parameters of a request that are accepted and change nothing: they are reported, or refused.

They are named in the header `x-ignored-parameters` of the answer and in the access log, and counted. Code
that finds one calls `ignore`, in the context of the request.
"""

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.record import RequestRecord

HEADER: Final = "x-ignored-parameters"
MAX_NAMES: Final = 32  # in the header; there may be more
_NAME: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,128}")  # printable ASCII without the comma


class IgnoredObserver(Protocol):
    def ignored_parameter(self) -> None:
        """A parameter of a request was ignored."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    record: RequestRecord
    observer: IgnoredObserver
    refuses_unknown: bool


_current: ContextVar[_Request | None] = ContextVar("ignored", default=None)


def ignore(name: str) -> None:
    """Report that a parameter of the current request changes nothing. Outside of a request, do nothing."""
    request = _current.get()
    if request is None:
        return
    names = request.record.ignored
    # A client's text, so it must not break the header.
    shown = name if _NAME.fullmatch(name) else "?"
    if shown in names:
        return
    request.observer.ignored_parameter()
    if len(names) < MAX_NAMES:
        names.append(shown)
        request.record.headers[HEADER] = ", ".join(names)


def unknown_are_refused() -> bool:
    """Return whether unknown parameters of the current request are errors."""
    request = _current.get()
    return request is not None and request.refuses_unknown


class IgnoredParameters:
    """Middleware that lets `ignore` report to each request's own record."""

    def __init__(self, app: ASGIApp, observer: IgnoredObserver, *, refuses_unknown: bool) -> None:
        self._app = app
        self._observer = observer
        self._refuses_unknown = refuses_unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(_Request(RequestRecord.of(scope), self._observer, self._refuses_unknown))
        await self._app(scope, receive, send)

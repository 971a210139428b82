"""One log line for every HTTP request, when it has been answered: what was asked, how it ended, how long it took, what it cost.

Never what a client wrote, but for the path; of an API key only its name.
"""

import logging
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.record import RequestRecord
from server.http.sent_status import SentStatus
from server.logs import fields

logger: Final = logging.getLogger("server.access")

_PROBES: Final = frozenset(
    {"/health", "/ready", "/metrics"}
)  # of which there are many: logged at level debug


class AccessLog:
    """Middleware that stands where the request's record has begun. Times are seconds; `first_byte` is when the answer began."""

    def __init__(self, app: ASGIApp, now: Callable[[], float]) -> None:
        self._app, self._now = app, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, first_byte, start = SentStatus(scope, send), None, self._now()

        async def noting(message: Message) -> None:
            nonlocal first_byte
            if message["type"] != "http.response.start" and first_byte is None:
                first_byte = round(self._now() - start, 6)
            await status(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            record = RequestRecord.of(scope)
            logger.log(
                logging.DEBUG if scope["path"] in _PROBES else logging.INFO,
                "request",
                extra=fields(
                    method=scope["method"][:16],
                    path=scope["path"][:256],
                    status=status.value,
                    duration=round(self._now() - start, 6),
                    first_byte=first_byte,
                    key=record.tenant or None,
                    prompt_tokens=record.num_prompt_tokens or None,
                    output_tokens=record.num_output_tokens or None,
                ),
            )

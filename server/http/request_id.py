"""The headers that every answer has: the request's id, the client's own if it sent one, and how long the server took to begin.

Here a request's record begins, and the headers that it gathers are sent; what is logged from here on has its id.
"""

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.record import RequestRecord
from server.logs import request_id


class RequestId:
    """Middleware that adds `x-request-id`, `openai-processing-ms` and the headers of the record."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        record = RequestRecord(_given(scope) or uuid.uuid4().hex)
        record.attach(scope)
        request_id.set(record.request_id)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(record.headers)
                headers["x-request-id"] = record.request_id
                headers["openai-processing-ms"] = str(round((time.monotonic() - began) * 1000))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _given(scope: Scope) -> str | None:
    """Return the id that the client sent, if it is one that may safely be sent back and written into a log."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and re.fullmatch(rb"[\x21-\x7e]{1,128}", value):
            return str(value, "ascii")
    return None

"""Middleware that marks every answer of a simulated server."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-simulated"


class SimulatedMark:
    """Middleware that adds the header `x-simulated: true` to every answer, including errors.

    It also adds the member `"simulated": true` to the JSON object of a body or of a stream's event. Clients
    of the OpenAI API ignore unknown members. The API's description, `/openapi.json`, gets the header only.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _MarkedSend(send, marks_bodies=scope.get("path") != "/openapi.json"))


class _MarkedSend:
    """Marks and sends one answer's messages."""

    def __init__(self, send: Send, *, marks_bodies: bool) -> None:
        self._send = send
        self._marks_bodies = marks_bodies
        self._start: Message | None = None
        self._is_stream = self._is_lines = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[HEADER] = "true"
            kind = headers.get("content-type", "") if self._marks_bodies else ""
            self._is_stream = kind.startswith("text/event-stream")
            self._is_lines = kind.startswith("application/x-ndjson")
            if kind.startswith("application/json"):
                # Held back until the body is marked, since the content length depends on the marked body.
                self._start = message
                return
        elif self._start is not None:
            message = await self._send_start(self._start, message)
        elif self._is_lines:
            message = {**message, "body": _marked(message.get("body", b""))}
        elif self._is_stream:
            # `EventStream` sends each event in one message.
            name, prefix, payload = message.get("body", b"").partition(b"data: ")
            message = {**message, "body": name + prefix + _marked(payload)}
        await self._send(message)

    async def _send_start(self, start: Message, body: Message) -> Message:
        """Send the held start, and return the marked body."""
        self._start = None
        content = body.get("body", b"")
        marked = _marked(content)
        headers = MutableHeaders(scope=start)
        if "content-length" in headers:
            num_added = len(marked) - len(content)
            headers["content-length"] = str(int(headers["content-length"]) + num_added)
        await self._send(start)
        return {**body, "body": marked}


def _marked(body: bytes) -> bytes:
    """Return a JSON object with the added member. An empty object or another value is returned unchanged."""
    return b'{"simulated":true,' + body[1:] if body.startswith(b'{"') else body

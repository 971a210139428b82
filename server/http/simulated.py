"""Middleware that marks every answer of a simulated server."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-simulated"


class SimulatedMark:
    """Middleware that marks every answer, errors too: with `x-simulated: true`, and JSON objects with `"simulated": true`.

    So it does with the events of streams. Clients of the OpenAI API keep or overlook members that they do not know. The description of
    the API itself is none of its answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _MarkedSend(send, marks_bodies=scope.get("path") != "/openapi.json"))


class _MarkedSend:
    """Sends one answer's messages, marked. The start of a JSON body waits for the body, which its length is that of."""

    def __init__(self, send: Send, *, marks_bodies: bool) -> None:
        self._send, self._marks_bodies = send, marks_bodies
        self._start: Message | None = None
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[HEADER] = "true"
            kind = headers.get("content-type", "") if self._marks_bodies else ""
            self._is_stream = kind.startswith("text/event-stream")
            if kind.startswith("application/json"):
                self._start = message
                return
        elif self._start is not None:
            message = await self._send_start(self._start, message)
        elif self._is_stream:
            name, prefix, payload = message.get("body", b"").partition(b"data: ")
            message = {**message, "body": name + prefix + _marked(payload)}
        await self._send(message)

    async def _send_start(self, start: Message, body: Message) -> Message:
        """Send the start that waited, and return the body with its mark."""
        self._start = None
        marked = _marked(body.get("body", b""))
        headers = MutableHeaders(scope=start)
        if "content-length" in headers:
            headers["content-length"] = str(
                int(headers["content-length"]) + len(marked) - len(body.get("body", b""))
            )
        await self._send(start)
        return {**body, "body": marked}


def _marked(body: bytes) -> bytes:
    """Return a JSON object with one more member; what is none stays as it is."""
    return b'{"simulated":true,' + body[1:] if body.startswith(b'{"') else body

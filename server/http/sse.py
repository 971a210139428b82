"""Server-sent events: the JSON objects of one response, and comments that keep its connection open."""

from collections.abc import Mapping
from typing import Final

from starlette.types import Send

from server.http.json_response import ascii_json

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise buffer the events
)


class EventStream:
    """A `text/event-stream` response."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self) -> None:
        """Send status 200 and the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def data(self, payload: Mapping[str, object], event: str | None = None) -> None:
        """Send an object, as an event named `event` if there is a name."""
        head = b"" if event is None else f"event: {event}\n".encode()
        await self._write(head + b"data: " + ascii_json(payload) + b"\n\n")

    async def comment(self, text: str) -> None:
        """Send a line that clients ignore."""
        await self._write(f": {text}\n\n".encode())

    async def done(self) -> None:
        """Send the marker of a complete answer."""
        await self._write(b"data: [DONE]\n\n")

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

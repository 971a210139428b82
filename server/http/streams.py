"""Streamed responses: server-sent events in the styles of the APIs, or lines of JSON."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Send

from server.http.json_response import ascii_json

# nginx would otherwise buffer the events.
HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventStream:
    """A `text/event-stream` response of events without names, up to the marker of a complete answer."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self) -> None:
        """Send status 200 and the headers."""
        headers = [(b"content-type", self.content_type), *HEADERS]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def data(self, payload: Mapping[str, object]) -> None:
        """Send an object."""
        await self._write(b"data: " + ascii_json(payload) + b"\n\n")

    async def keep_alive(self, progress: str) -> None:
        """Send something that clients ignore, since the stream has been silent."""
        await self._write(f": {progress}\n\n".encode())

    async def done(self) -> None:
        """Mark the answer as complete."""
        await self._write(b"data: [DONE]\n\n")

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


class NamedEventStream(EventStream):
    """Events have their type as their name, and the last one says that the answer is complete."""

    async def data(self, payload: Mapping[str, object]) -> None:
        await self._write(f"event: {payload['type']}\ndata: ".encode() + ascii_json(payload) + b"\n\n")

    async def done(self) -> None: ...


class PingedEventStream(NamedEventStream):
    """Anthropic's style: a silent stream has events of type `ping`."""

    async def keep_alive(self, progress: str) -> None:  # noqa: ARG002
        await self.data({"type": "ping"})


class LineStream(EventStream):
    """Ollama's style: an object a line. Nothing can be sent that clients ignore."""

    content_type = b"application/x-ndjson"

    async def data(self, payload: Mapping[str, object]) -> None:
        await self._write(ascii_json(payload) + b"\n")

    async def keep_alive(self, progress: str) -> None: ...

    async def done(self) -> None: ...


def described(stream: type[EventStream]) -> dict[int | str, dict[str, Any]]:
    """Return what the API's description says of a route that streams on request, beside its JSON."""
    media_type = stream.content_type.decode().partition(";")[0]
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}

"""One HTTP request over a connection of its own, and the bytes of its response with the moments when they came.

Nothing is parsed while a run goes on: a general HTTP client spends several times as long on every streamed token, which costs a server on
the same machine its time, and the other streams their moments.
"""

import asyncio
import ssl
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult

import h11

CONNECT_LIMIT = 30.0  # seconds
_OK = (b"HTTP/1.1 200", b"HTTP/1.0 200")
_LAST_CHUNK = b"0\r\n\r\n"
_END = b""  # h11's sign for the end of a connection


class ConnectionCutError(Exception):
    """The connection ended before the response did."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A response as it came. `sent` is the moment before the connection was made: a client waits for that too."""

    sent: float
    pieces: tuple[tuple[float, bytes], ...]

    @property
    def is_ok(self) -> bool:
        """Whether it says so itself: its body may still turn out to be an error."""
        return bool(self.pieces) and self.pieces[0][1].startswith(_OK)

    @property
    def is_whole(self) -> bool:
        """Whether nothing more can come."""
        try:
            return any(isinstance(event, h11.EndOfMessage) for _, event in _events(self.pieces))
        except h11.RemoteProtocolError:
            return True

    def read(self) -> tuple[int, list[tuple[float, bytes]]]:
        """Return the status, and the pieces of the body. Raises `ConnectionCutError` for a response that is not whole."""
        if not self.pieces:
            raise ConnectionCutError("closed without a response")
        status, body = 0, list[tuple[float, bytes]]()
        try:
            for moment, event in _events((*self.pieces, (self.pieces[-1][0], _END))):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((moment, bytes(event.data)))
        except h11.RemoteProtocolError as error:
            raise ConnectionCutError(str(error)) from error
        return status, body


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, h11.Event]]:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "any"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    for moment, piece in pieces:
        reader.receive_data(piece)
        while isinstance(event := reader.next_event(), h11.Event):
            yield moment, event
            if isinstance(event, h11.EndOfMessage):
                return


class _Recorder(asyncio.Protocol):
    def __init__(self, request: bytes, sent: float) -> None:
        self._request = request
        self._sent = sent
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def recording(self) -> Recording:
        return Recording(self._sent, tuple(self.pieces))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        # Servers may keep a connection open that they were asked to close. Streams end with an empty chunk, refusals are short.
        is_stream = self.pieces[0][1].startswith(_OK)
        if not self.ended.done() and (data.endswith(_LAST_CHUNK) if is_stream else self.recording.is_whole):
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def exchange(url: SplitResult, request: bytes) -> Recording:
    """Send a request and record what comes until the response is whole or the connection ends. Raises OSError."""
    sent = time.perf_counter()
    secured = ssl.create_default_context() if url.scheme == "https" else None
    assert url.hostname is not None
    port = url.port or (443 if secured else 80)
    async with asyncio.timeout(CONNECT_LIMIT):
        transport, recorder = await asyncio.get_running_loop().create_connection(
            lambda: _Recorder(request, sent), url.hostname, port, ssl=secured
        )
    try:
        await recorder.ended
    finally:
        transport.abort()
    return recorder.recording


def post(url: SplitResult, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """Return the bytes of a request that asks the server to close the connection after its answer."""
    writer = h11.Connection(h11.CLIENT)
    own = [
        ("Host", url.netloc.rpartition("@")[2]),
        ("Connection", "close"),
        ("Content-Length", str(len(body))),
    ]
    head = writer.send(h11.Request(method="POST", target=url.path + path, headers=own + headers))
    assert head is not None
    return head + body

"""One HTTP request over a connection of its own, and the bytes of its response with the moments when they came.

Nothing is parsed while a run goes on: a general HTTP client spends several times as long on every streamed token, which costs a server on
the same machine its time, and the other streams their moments.
"""

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult

import h11

CONNECT_LIMIT = 30.0  # seconds
_OK = (b"HTTP/1.1 200", b"HTTP/1.0 200")


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

    def read(self) -> tuple[int, list[tuple[float, bytes]]]:
        """Return the status, and the pieces of the body. Raises `ConnectionCutError` for a response that is not whole."""
        if not self.pieces:
            raise ConnectionCutError("closed without a response")
        status, body = 0, list[tuple[float, bytes]]()
        try:
            for moment, event in self._events():
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((moment, bytes(event.data)))
        except h11.RemoteProtocolError as error:
            raise ConnectionCutError(str(error)) from error
        return status, body

    def _events(self) -> Iterator[tuple[float, h11.Event]]:
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="POST", target="/", headers=[("Host", "any"), ("Content-Length", "0")]))
        reader.send(h11.EndOfMessage())
        for moment, piece in (*self.pieces, (self.pieces[-1][0], b"")):
            reader.receive_data(piece)
            while isinstance(event := reader.next_event(), h11.Event):
                yield moment, event
                if isinstance(event, h11.EndOfMessage):
                    return


class _Recorder(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def exchange(url: SplitResult, request: bytes) -> Recording:
    """Send a request and record what comes until the server closes the connection. Raises OSError."""
    sent = time.perf_counter()
    secured = ssl.create_default_context() if url.scheme == "https" else None
    assert url.hostname is not None
    port = url.port or (443 if secured else 80)
    async with asyncio.timeout(CONNECT_LIMIT):
        transport, recorder = await asyncio.get_running_loop().create_connection(
            lambda: _Recorder(request), url.hostname, port, ssl=secured
        )
    try:
        await recorder.ended
    finally:
        transport.abort()
    return Recording(sent, tuple(recorder.pieces))


def post(url: SplitResult, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """Return the bytes of a request that asks the server to close the connection after its answer."""
    writer = h11.Connection(h11.CLIENT)
    own = [("Host", url.netloc.rpartition("@")[2]), ("Connection", "close"), ("Content-Length", str(len(body)))]
    head = writer.send(h11.Request(method="POST", target=url.path + path, headers=own + headers))
    assert head is not None
    return head + body

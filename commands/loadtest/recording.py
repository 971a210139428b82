"""One HTTP request over its own connection, and the bytes of its response with their times of arrival.

Nothing is parsed during a run. A general HTTP client spends several times as long on each streamed token.
That would take processor time from a server on the same machine, and would delay the time stamps of other
streams.
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
_END = b""  # marks the end of a connection for h11


class ConnectionCutError(Exception):
    """The connection ended before the response did."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The raw bytes of a response in pieces, each with its time of arrival.

    `sent` is the time before the connection was made: a client waits for the connection too.
    """

    sent: float
    pieces: tuple[tuple[float, bytes], ...]

    @property
    def is_ok(self) -> bool:
        """Whether the status is 200. The body may still contain an error."""
        return bool(self.pieces) and self.pieces[0][1].startswith(_OK)

    @property
    def is_whole(self) -> bool:
        """Whether the response is complete, or is not HTTP: nothing more can follow."""
        try:
            return any(isinstance(event, h11.EndOfMessage) for _, event in _events(self.pieces))
        except h11.RemoteProtocolError:
            return True

    def read(self) -> tuple[int, list[tuple[float, bytes]]]:
        """Return the status and the pieces of the body.

        Raises `ConnectionCutError` for an incomplete response.
        """
        if not self.pieces:
            raise ConnectionCutError("closed without a response")
        status = 0
        body: list[tuple[float, bytes]] = []
        last_time = self.pieces[-1][0]
        try:
            for arrival, event in _events((*self.pieces, (last_time, _END))):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((arrival, bytes(event.data)))
        except h11.RemoteProtocolError as error:
            raise ConnectionCutError(str(error)) from error
        return status, body


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, h11.Event]]:
    """Yield the events of a response, each with the arrival time of the piece that completes it."""
    reader = h11.Connection(h11.CLIENT)
    # h11 reads a response only after a request. This one stands in for the request that was sent as bytes.
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "any"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    for arrival, piece in pieces:
        reader.receive_data(piece)
        while isinstance(event := reader.next_event(), h11.Event):
            yield arrival, event
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
        # A server may keep the connection open despite "Connection: close", so the end is looked for in the
        # bytes. A stream ends with an empty chunk. An error is short, so parsing it after each piece is
        # cheap.
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
    """Send a request and record its response until it is complete or the connection ends.

    Raises `OSError`.
    """
    sent = time.perf_counter()
    tls = ssl.create_default_context() if url.scheme == "https" else None
    assert url.hostname is not None
    port = url.port or (443 if tls else 80)
    async with asyncio.timeout(CONNECT_LIMIT):
        transport, recorder = await asyncio.get_running_loop().create_connection(
            lambda: _Recorder(request, sent), url.hostname, port, ssl=tls
        )
    try:
        await recorder.ended
    finally:
        transport.abort()
    return recorder.recording


def post(url: SplitResult, path: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """Return the bytes of a POST request with `Connection: close`."""
    writer = h11.Connection(h11.CLIENT)
    own_headers = [
        ("Host", url.netloc.rpartition("@")[2]),
        ("Connection", "close"),
        ("Content-Length", str(len(body))),
    ]
    head = writer.send(h11.Request(method="POST", target=url.path + path, headers=own_headers + headers))
    assert head is not None
    return head + body

"""uvicorn's HTTP/1.1 protocol with bounds on what a connection may cost, which neither uvicorn nor the parser sets.

How long a head may be, how long a request may take to arrive and an answer to be read, how long a connection may be idle, and how many
there may be. It knows nothing of what is asked or answered.
"""

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, unavailable
from server.jsontext import ascii_json
from server.settings import ConnectionLimits

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers; what is read in one go may exceed it once
BODY_PIECE = 64 * 1024  # of a body has to come in the time that a head has
MAX_REFUSED = 32  # connections beyond the limit that are told so; more are closed without a word
RETRY_AFTER = 5  # seconds


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head that does not end, 408 to a request that does not, 503 to connections beyond the limit, and closes them.

    A connection whose client does not take what is sent to it is broken off, and with it the request that it waits for.
    """

    limits = ConnectionLimits()

    _is_in_head = True
    _is_refused = False
    _num_head_bytes = 0
    _num_body_bytes = 0  # of the piece that is being waited for
    _began: float | None = None  # when a request that has not come whole began, or the piece of its body that is being waited for
    _idle_since: float | None = None
    _unsent_since: float | None = None  # since when the client has been seen to take nothing of what waits for it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = self.limits.idle_timeout  # type: ignore[assignment]  # uvicorn only hands it to `call_later`
        num_beyond = len(self.connections) - self.limits.max_connections
        self._is_refused = num_beyond > 0
        if num_beyond > MAX_REFUSED:
            transport.abort()
        self._interval = min(1.0, min(self.limits.read_timeout, self.limits.write_timeout, self.limits.idle_timeout) / 4)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watcher.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes, self._num_body_bytes = True, 0, 0
        self._began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_PIECE:
            self._num_body_bytes, self._began = 0, self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._began = None
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._refuse(unavailable("too_many_connections", "The server has as many connections as it may have.", RETRY_AFTER))
            return
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, "headers_too_large", f"The request's headers are larger than {MAX_HEAD_BYTES} bytes."))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "invalid_http", msg))

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        body = ascii_json(error.body())
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"} | error.headers
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def resume_writing(self) -> None:
        self._unsent_since = None  # much of what waited is gone
        super().resume_writing()

    # Time limits

    def _watch(self) -> None:
        """Look after the connection every now and then, until it is lost: also when it is closing, which takes a client that reads."""
        self._watcher = self.loop.call_later(self._interval, self._watch)
        now = self.loop.time()
        self._check_writing(now)
        self._check_reading(now)
        self._check_idling(now)

    def _check_writing(self, now: float) -> None:
        self._unsent_since = (self._unsent_since or now) if self.transport.get_write_buffer_size() else None
        if self._unsent_since is not None and now - self._unsent_since >= self.limits.write_timeout:
            self.transport.abort()

    def _check_reading(self, now: float) -> None:
        if self._began is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is the server that is slow
            self._began = now
        elif now - self._began >= self.limits.read_timeout:
            self._end_reading()

    def _end_reading(self) -> None:
        is_free = self.cycle is None or self.cycle.response_complete if self._is_in_head else not self.cycle.response_started
        if is_free:
            self._refuse(ApiError(408, "request_timeout", f"The request was not sent on within {self.limits.read_timeout:g} seconds."))
        else:  # an answer is under way, into which nothing can be written
            self.transport.abort()

    def _check_idling(self, now: float) -> None:
        is_idle = self._began is None and (self.cycle is None or self.cycle.response_complete)
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= self.limits.idle_timeout:
            self.transport.close()


def protocol_with(connection_limits: ConnectionLimits) -> type[BoundedHttpProtocol]:
    """Return the protocol with these limits, for `uvicorn.Config.http`."""

    class LimitedHttpProtocol(BoundedHttpProtocol):
        limits = connection_limits

    return LimitedHttpProtocol

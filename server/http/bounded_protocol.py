"""uvicorn's HTTP/1.1 protocol with bounds on what a connection may cost, which neither uvicorn nor the parser sets.

How long a head may be, how long a request may take to arrive and an answer to be read, how long a connection may be idle, and how many
there may be. It knows nothing of what is asked or answered.
"""

import asyncio
from collections.abc import Sized
from http import HTTPStatus

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.http.errors import ApiError, unavailable
from server.http.json_response import ascii_json
from server.http.observers import record_refusal
from server.options.settings import ConnectionLimits

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers; what is read in one go may exceed it once
BODY_PIECE = 64 * 1024  # of a body has to come in the time that a head has
MAX_REFUSED = 32  # connections beyond the limit that are told so; more are closed without a word
MAX_PIPELINED = 16  # requests that wait for the answer before theirs while more is read; what is read in one go may exceed it once
RETRY_AFTER = 5  # seconds


class PipelineFlow(FlowControl):
    """uvicorn's, which reads on whenever an application asks for more: but not while many requests wait for their turn."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) < MAX_PIPELINED:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head that does not end, 408 to a request that does not, 503 to connections beyond the limit, and closes them.

    A connection whose client does not take what is sent to it is broken off, and with it the request that it waits for.
    """

    limits = ConnectionLimits()

    _answering: RequestResponseCycle | None = (
        None  # whose turn it is, or was last; `cycle` is the newest, which may wait
    )
    _is_in_head = True
    _is_refused = False
    _has_ended_one = (
        False  # a request, in what was read last: the head after it is counted from the next reading on
    )
    _num_head_bytes = 0
    _num_body_bytes = 0  # of the piece that is being waited for
    _began: float | None = (
        None  # when a request that has not come whole began, or the piece of its body that is being waited for
    )
    _idle_since: float | None = None
    _unsent_since: float | None = (
        None  # since when the client has been seen to take nothing of what waits for it
    )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        self.timeout_keep_alive = self.limits.idle_timeout  # type: ignore[assignment]  # uvicorn only hands it to `call_later`
        num_beyond = len(self.connections) - self.limits.max_connections
        self._is_refused = num_beyond > 0
        if num_beyond > MAX_REFUSED:
            transport.abort()
        self._interval = min(
            1.0, min(self.limits.read_timeout, self.limits.write_timeout, self.limits.idle_timeout) / 4
        )
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watcher.cancel()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes, self._num_body_bytes = True, 0, 0
        self._began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn pauses at a request that has to wait, but that a client goes is seen by reading

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_PIECE:
            self._num_body_bytes, self._began = 0, self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._began, self._has_ended_one = None, True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._refuse(
                unavailable(
                    "too_many_connections", "The server has as many connections as it may have.", RETRY_AFTER
                )
            )
            return
        self._has_ended_one = False
        super().data_received(data)
        if self._is_in_head and not self._has_ended_one and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    ApiError(
                        431,
                        "headers_too_large",
                        f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.",
                    )
                )

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "invalid_http", msg))

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if not self._can_answer():
            self.transport.abort()
            return
        if self._answering is not None and not self._answering.response_started:
            record_refusal(self._answering.scope, error.status)  # type: ignore[arg-type]  # uvicorn's type of the same
        body = ascii_json(error.body())
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        } | error.headers
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _can_answer(self) -> bool:
        """Say whether a refusal would be read as one: not in the middle of an answer, and not after that to the refused request."""
        is_in_body = self._began is not None and not self._is_in_head
        if is_in_body and self.cycle.response_complete:
            return False
        return (
            self._answering is None
            or not self._answering.response_started
            or self._answering.response_complete
        )

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
            self._refuse(
                ApiError(
                    408,
                    "request_timeout",
                    f"The request was not sent on within {self.limits.read_timeout:g} seconds.",
                )
            )

    def _check_idling(self, now: float) -> None:
        is_idle = self._began is None and (self.cycle is None or self.cycle.response_complete)
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= self.limits.idle_timeout:
            self.transport.close()

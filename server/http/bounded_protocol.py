"""uvicorn's HTTP/1.1 protocol with bounds on the cost of a connection, which uvicorn does not set.

Bounded are the size of a request's head, the time of a request to arrive and of an answer to be read, the
time that a connection may be idle, and the number of connections. The module does not depend on the API.

This is the only module that uses internals of uvicorn: a subclass of its protocol is the only way to see a
head before it is complete, a body that arrives slowly, and a write buffer that does not drain. An application
sees a request only once its head is parsed. The module raises ImportError when an internal is missing, and
`server.http.connection` then serves without it.
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
from server.http.refusals import Refusals
from server.options.settings import ConnectionLimits

MAX_HEAD_BYTES = 64 * 1024  # of a request line and headers; one read may exceed it
BODY_PIECE_BYTES = 64 * 1024  # of a body that must arrive within the read timeout
MAX_REFUSED = 32  # connections beyond the limit that get a 503; further ones are closed without an answer
MAX_PIPELINED = 16  # requests that may wait for the answer to an earlier one; one read may exceed it
RETRY_AFTER = 5  # seconds

# The internals used below. A renamed one would break every connection, or silently switch a limit off.
_USED_NAMES = {
    FlowControl: {"read_paused", "resume_reading"},
    HttpToolsProtocol: {
        "_start_asgi_task",
        "connections",
        "cycle",
        "flow",
        "loop",
        "pipeline",
        "send_400_response",
        "timeout_keep_alive",
        "transport",
    },
    RequestResponseCycle: {"disconnected", "message_event", "response_complete", "response_started", "scope"},
}
for _class, _names in _USED_NAMES.items():
    # `dir` has the methods, the code of `__init__` the attributes that an instance starts with.
    _missing = _names.difference(dir(_class), vars(_class)["__init__"].__code__.co_names)
    if _missing:
        raise ImportError(f"{_class.__name__} has no {', '.join(sorted(_missing))}")


class PipelineFlow(FlowControl):
    """Resumes reading when an application wants more of a body, unless many pipelined requests wait."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) < MAX_PIPELINED:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to a long head, 408 to a slow request and 503 beyond the connection limit, then closes.

    A connection whose client does not read is aborted, and its request ends as if the client had
    disconnected.
    """

    limits: ConnectionLimits
    refusals: Refusals

    # The request that is being answered, or was answered last. uvicorn's `cycle` is the newest request, which
    # may be pipelined and wait.
    _answering: RequestResponseCycle | None = None
    _is_in_head = True
    _is_refused = False
    # Whether a request ended in the last read. The bytes of a head behind it count from the next read on.
    _has_ended_request = False
    _num_head_bytes = 0
    _num_body_bytes = 0  # of the current piece of the body
    # When the incomplete request, or the current piece of its body, began to arrive; None: neither.
    _arriving_since: float | None = None
    _idle_since: float | None = None
    _unsent_since: float | None = None  # when the write buffer was first seen to hold unread bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        # uvicorn declares an int, but only passes the value to `call_later`, which takes a float.
        self.timeout_keep_alive = self.limits.idle_timeout  # type: ignore[assignment]
        num_excess = len(self.connections) - self.limits.max_connections
        self._is_refused = num_excess > 0
        if self._is_refused:
            self.refusals.add(self.loop.time())
        if num_excess > MAX_REFUSED:
            transport.abort()
        shortest = min(self.limits.read_timeout, self.limits.write_timeout, self.limits.idle_timeout)
        self._interval = min(1.0, shortest / 4)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watcher.cancel()
        # uvicorn wakes only the newest request. With pipelined requests, another one is being answered.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._arriving_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        # uvicorn pauses reading when a pipelined request has to wait. But a disconnect is noticed only while
        # reading.
        self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_PIECE_BYTES:
            self._num_body_bytes = 0
            self._arriving_since = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving_since = None
        self._has_ended_request = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            message = f"The server has reached its limit of {self.limits.max_connections} connections."
            self._refuse(unavailable("too_many_connections", message, RETRY_AFTER))
            return
        self._has_ended_request = False
        super().data_received(data)
        if self._is_in_head and not self._has_ended_request and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                message = f"The request's headers are larger than {MAX_HEAD_BYTES} bytes."
                self._refuse(ApiError(431, "headers_too_large", message))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "invalid_http", msg))

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if not self._can_answer():
            self.transport.abort()
            return
        if self._answering is not None and not self._answering.response_started:
            record_refusal(self._answering.scope, error.status)  # type: ignore[arg-type]  # uvicorn's own type
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
        """Return whether a client can recognize a refusal as a separate answer.

        It cannot in the middle of another answer, nor after the answer to the refused request itself.
        """
        is_in_body = self._arriving_since is not None and not self._is_in_head
        # A request whose target cannot be read has no cycle.
        if is_in_body and self.cycle is not None and self.cycle.response_complete:
            return False
        return (
            self._answering is None
            or not self._answering.response_started
            or self._answering.response_complete
        )

    def resume_writing(self) -> None:
        self._unsent_since = None  # the client has read, since the write buffer fell below its low-water mark
        super().resume_writing()

    # Time limits

    def _watch(self) -> None:
        """Check the time limits every `_interval` seconds until the connection is lost.

        A closing connection is checked too: it closes only once its client has read the rest.
        """
        self._watcher = self.loop.call_later(self._interval, self._watch)
        now = self.loop.time()
        self._check_writing(now)
        self._check_reading(now)
        self._check_idling(now)

    def _check_writing(self, now: float) -> None:
        if not self.transport.get_write_buffer_size():
            self._unsent_since = None
            return
        if self._unsent_since is None:
            self._unsent_since = now
        if now - self._unsent_since >= self.limits.write_timeout:
            self.transport.abort()

    def _check_reading(self, now: float) -> None:
        if self._arriving_since is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server is slow, not the client
            self._arriving_since = now
        elif now - self._arriving_since >= self.limits.read_timeout:
            message = f"The rest of the request did not arrive within {self.limits.read_timeout:g} seconds."
            self._refuse(ApiError(408, "request_timeout", message))

    def _check_idling(self, now: float) -> None:
        is_idle = self._arriving_since is None and (self.cycle is None or self.cycle.response_complete)
        if not is_idle:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since >= self.limits.idle_timeout:
            self.transport.close()

"""A small HTTP server of the standard library whose replies, errors and faults are scripted by a test."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(content: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]})


def usage(num_input: int, num_output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": num_input, "completion_tokens": num_output}})


DONE = b"data: [DONE]\n\n"


def whole(num_input: int = 7, num_output: int = 3) -> tuple[bytes, ...]:
    """Return a complete answer, one chunk for each token."""
    return (*[text("a")] * num_output, text("", "length"), usage(num_input, num_output), DONE)


@dataclass(frozen=True)
class Reply:
    """The reply to one request: a status, and pieces of a body, each after `delay` seconds.

    `is_cut` closes the connection before the end of the body. `is_kept_open` keeps the connection open after
    the reply, even if the client requested `Connection: close`.
    """

    pieces: Sequence[bytes]
    status: int = 200
    delay: float = 0.0
    is_cut: bool = False
    is_kept_open: bool = False


@dataclass
class ScriptedServer:
    """The requests received, in the order of arrival.

    `choose` returns the reply to a request from its index and its body. It runs in that request's thread.
    """

    choose: Callable[[int, dict[str, Any]], Reply]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        """Record a request and return its index."""
        with self.lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            return len(self.bodies) - 1

    def leave(self) -> None:
        with self.lock:
            self.num_open -= 1


@contextmanager
def scripted(choose: Callable[[int, dict[str, Any]], Reply]) -> Iterator[ScriptedServer]:
    """Serve scripted replies until the block ends."""
    script = ScriptedServer(choose)

    class Play(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(Reply([json.dumps({"data": [{"id": "scripted"}]}).encode()]))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            index = script.enter(body, dict(self.headers.items()))
            try:
                reply = script.choose(index, body)
            finally:
                # Before the reply: after it, the next request may come before this thread ends.
                script.leave()
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in reply.pieces:
                time.sleep(reply.delay)
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if reply.is_kept_open:
                self.close_connection = False
            if reply.is_cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Play)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Limits of a connection over real sockets: heads, slow requests and readers, idle ones, and their number."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from server.http.bounded_protocol import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_REFUSED
from server.http.connection import protocol_with
from server.options.settings import ConnectionLimits

CLOSE = b"Connection: close\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
LIMITS = ConnectionLimits()
PIECE = b"x" * 65536
MAX_READ = 256 * 1024  # bytes that an event loop reads in one go

Address = tuple[str, int]


class Refused:
    """Counts connections beyond the limit."""

    def __init__(self) -> None:
        self.num = 0

    def refused_connection(self) -> None:
        self.num += 1


REFUSED = Refused()


class Streams:
    """What became of the endless streams of the application, and of what waits for its client to go."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.has_ended = asyncio.Event()
        self.connections: set[Any] = set()  # the server's protocols
        self.is_waiting, self.has_seen_the_end = asyncio.Event(), asyncio.Event()

    async def endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.num_sent += len(PIECE)
                yield PIECE
                await asyncio.sleep(0)  # let other tasks run
        finally:
            self.has_ended.set()

    async def begun(self) -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def wait(self, request: Request) -> None:
        await request.body()
        self.is_waiting.set()
        assert (await request.receive())["type"] == "http.disconnect"
        self.has_seen_the_end.set()


@asynccontextmanager
async def server(limits: ConnectionLimits = LIMITS) -> AsyncIterator[tuple[Address, Streams]]:
    """Run a server with short routes `/` and `/early`, and endless `/endless`, `/begun` and `/wait`."""
    app, streams = FastAPI(), Streams()

    async def read(request: Request) -> int:
        return len(await request.body())

    app.add_api_route("/", read, methods=["GET", "POST"])
    app.add_api_route("/early", lambda: "yes", methods=["POST"])
    app.add_api_route("/endless", lambda: StreamingResponse(streams.endless()), methods=["GET"])
    app.add_api_route("/begun", lambda: StreamingResponse(streams.begun()), methods=["GET"])
    app.add_api_route("/wait", streams.wait, methods=["GET"])
    listener = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(
        uvicorn.Config(app, http=protocol_with(limits, REFUSED), log_config=None, lifespan="off")
    )
    streams.connections = uvicorn_server.server_state.connections
    serving = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[:2], streams
    finally:
        uvicorn_server.should_exit = True
        await serving


@asynccontextmanager
async def connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the server closes the connection; bytes sent after that reset it."""
    text = b""
    async with asyncio.timeout(30):
        with suppress(ConnectionResetError):
            while part := await reader.read(65536):
                text += part
    return text


def error_of(text: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(text.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET /"])
async def test_a_head_that_does_not_end_is_refused(start: bytes) -> None:
    async with server() as (address, _), connection(address) as (reader, writer):
        writer.write(start + b"a" * (MAX_HEAD_BYTES + 1 - len(start)))
        text = await answer(reader)
    assert text.startswith(b"HTTP/1.1 431 ")
    assert error_of(text)["code"] == "headers_too_large"


async def test_heads_of_an_ordinary_size_and_long_bodies_pass() -> None:
    async with server() as (address, _), connection(address) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n")
        body = b"a" * (4 * MAX_HEAD_BYTES)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body) + CLOSE + body)
        text = await answer(reader)
    assert text.count(b"HTTP/1.1 200 OK") == 2


async def test_invalid_http_gets_an_error_in_the_usual_shape() -> None:
    async with server() as (address, _), connection(address) as (reader, writer):
        writer.write(b"hello?\r\n\r\n")
        text = await answer(reader)
    assert text.startswith(b"HTTP/1.1 400 ")
    assert error_of(text)["code"] == "invalid_http"


@pytest.mark.parametrize("sent", [b"G", GET[:-2], POST, POST + b"half", GET + b"P", GET + POST])
async def test_an_incomplete_request_times_out(sent: bytes) -> None:
    async with (
        server(ConnectionLimits(read_timeout=0.2)) as (address, _),
        connection(address) as (reader, writer),
    ):
        writer.write(sent)
        text = await answer(reader)
    assert text.count(b"HTTP/1.1 408 Request Timeout") == 1
    assert text.count(b"HTTP/1.1 200 OK") == sent.count(GET)
    assert error_of(text[text.index(b"HTTP/1.1 408") :])["code"] == "request_timeout"


async def test_a_trickling_request_times_out() -> None:
    async with (
        server(ConnectionLimits(read_timeout=0.3)) as (address, _),
        connection(address) as (reader, writer),
    ):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        reading = asyncio.create_task(answer(reader))
        while not reading.done():
            writer.write(b"x")
            await asyncio.wait((reading,), timeout=0.02)
        assert (await reading).startswith(b"HTTP/1.1 408 ")


async def test_an_unread_body_does_not_delay_the_answer() -> None:
    async with (
        server(ConnectionLimits(read_timeout=0.2)) as (address, _),
        connection(address) as (reader, writer),
    ):
        writer.write(POST.replace(b"POST /", b"POST /early"))
        text = await answer(reader)
    assert text.startswith(b"HTTP/1.1 200 OK")
    assert b" 408 " not in text


@pytest.mark.parametrize("number", [2, 200])
async def test_requests_can_be_pipelined(number: int) -> None:
    bodies = [b"x" * (size % 50) for size in range(number)]
    async with server() as (address, _), connection(address) as (reader, writer):
        for body in bodies:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.write(GET[:-2] + CLOSE)
        text = await answer(reader)
    assert [int(part.rpartition(b"\r\n\r\n")[2]) for part in text.split(b"HTTP/1.1 200 OK\r\n")[1:]] == [
        *map(len, bodies),
        0,
    ]


async def test_a_disconnect_with_pipelined_requests_ends_the_running_one() -> None:
    async with server() as (address, streams), connection(address) as (_, writer):
        writer.write(WAIT + GET)
        await streams.is_waiting.wait()
        writer.write(GET)
        writer.close()
        async with asyncio.timeout(30):
            await streams.has_seen_the_end.wait()


async def test_requests_that_wait_for_their_turn_are_few() -> None:
    """What else was sent waits in sockets, however fast the answers are read."""
    request = POST + b"0123456789"
    async with server() as (address, streams), connection(address) as (reader, writer):
        writer.write(request * 30_000)
        for _ in range(100):
            await reader.readuntil(b"HTTP/1.1 200 OK")
        [protocol] = streams.connections
        assert 0 < len(protocol.pipeline) < MAX_PIPELINED + MAX_READ // len(request)
        writer.transport.abort()


@pytest.mark.parametrize("sent", [b"P", POST, b"no HTTP\r\n\r\n"])
async def test_a_started_answer_is_not_overwritten(sent: bytes) -> None:
    async with (
        server(ConnectionLimits(read_timeout=0.3)) as (address, _),
        connection(address) as (reader, writer),
    ):
        writer.write(b"GET /begun HTTP/1.1\r\nHost: x\r\n\r\n")
        text = await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        text += await answer(reader)
    assert text.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("sent", [b"", GET, b"\r\n\r\n"])
async def test_an_idle_connection_is_closed(sent: bytes) -> None:
    async with (
        server(ConnectionLimits(idle_timeout=0.2)) as (address, _),
        connection(address) as (reader, writer),
    ):
        writer.write(sent)
        text = await answer(reader)
    assert text.count(b"HTTP/1.1 200 OK") == sent.count(GET)


async def test_connections_above_the_limit_get_a_503_and_far_above_it_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_before = REFUSED.num
    async with server(ConnectionLimits(max_connections=2)) as (address, _), AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connection(address)) for _ in range(2 + MAX_REFUSED)]
        for reader, writer in streams[:2]:
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        async with connection(address) as (reader, _):
            assert await answer(reader) == b""
        reader, writer = streams[2]
        writer.write(GET)
        text = await answer(reader)
        assert text.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in text
        assert error_of(text)["code"] == "too_many_connections"
        streams[0][1].write(GET)
        assert (await streams[0][0].readuntil(b"HTTP/1.1 200 OK")).endswith(b"HTTP/1.1 200 OK")
        assert REFUSED.num - num_before == MAX_REFUSED + 1
    logged = [record.message for record in caplog.records if "beyond --max-connections" in record.message]
    assert logged == ["refused 1 connections beyond --max-connections 2"]  # more within 10 s are one line


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_read", [0, 100_000])
def test_a_client_that_stops_reading_is_dropped(
    new_loop: Callable[[], asyncio.AbstractEventLoop], num_read: int
) -> None:
    """It costs no more than what sockets hold, and the request ends."""

    async def run() -> int:
        async with server(ConnectionLimits(write_timeout=0.3)) as (address, streams):
            with socket.create_connection(address) as client:
                client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.to_thread(_read, client, num_read)
                async with asyncio.timeout(30):
                    await streams.has_ended.wait()
            return streams.num_sent

    assert _run(new_loop, run) < 64 * 1024 * 1024


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_reads_on_is_not(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> int:
        async with server(ConnectionLimits(write_timeout=0.3, read_timeout=0.3, idle_timeout=0.3)) as (
            address,
            streams,
        ):
            with socket.create_connection(address) as client:
                client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
                loop = asyncio.get_running_loop()
                start = loop.time()
                while loop.time() < start + 1.0:  # more than three times what a reader may lag
                    assert await asyncio.to_thread(_read, client, 2_000_000) == 2_000_000
                assert not streams.has_ended.is_set()
            return streams.num_sent

    assert _run(new_loop, run) >= 2_000_000


def _run(new_loop: Callable[[], asyncio.AbstractEventLoop], run: Callable[[], Awaitable[int]]) -> int:
    async def main() -> int:
        return await run()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main())


def _read(client: socket.socket, num_bytes: int) -> int:
    """Read a number of bytes, or until the server closes the connection."""
    num_read = 0
    while num_read < num_bytes and (piece := client.recv(min(65536, num_bytes - num_read))):
        num_read += len(piece)
    return num_read


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT a:1",
        "CONNECT a",
        "CONNECT [::1]:99999",
        "GET http://a:99999/",
        "GET http://a:b/",
        "GET http://",
        "GET foo",
    ],
)
async def test_an_invalid_target_is_a_400(line: str, caplog: pytest.LogCaptureFixture) -> None:
    async with server() as (address, _), connection(address) as (reader, writer):
        writer.write(f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await answer(reader)).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert "Traceback" not in caplog.text

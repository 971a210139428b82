"""Heads of requests that do not end, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI

from server.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol

CLOSE = b"Connection: close\r\n\r\n"


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a server that knows `GET /` and `POST /`."""
    app = FastAPI()
    app.add_api_route("/", lambda: "yes", methods=["GET", "POST"])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttpProtocol, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET /"])
async def test_a_head_that_does_not_end_is_refused(start: bytes) -> None:
    async with connection() as (reader, writer):
        writer.write(start + b"a" * (MAX_HEAD_BYTES + 1 - len(start)))
        text = await answer(reader)
    assert text.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in text


async def test_heads_of_an_ordinary_size_and_long_bodies_pass() -> None:
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n")
        body = b"a" * (4 * MAX_HEAD_BYTES)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body) + CLOSE + body)
        text = await answer(reader)
    assert text.count(b"HTTP/1.1 200 OK") == 2

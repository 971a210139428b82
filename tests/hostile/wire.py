"""Requests as bytes on a socket, as no client library would send them."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

Address = tuple[str, int]
TIME_LIMIT = 60  # seconds that an answer may take on a machine that is busy with other things


@contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=TIME_LIMIT) as connection:
        yield connection


def head(path: str = "/v1/completions", method: str = "POST", **headers: str | int) -> bytes:
    """Return a request's line and headers. An underscore in a name becomes a hyphen."""
    fields = {"Host": "localhost", "Content_Type": "application/json"} | headers
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def request(body: Mapping[str, object] | bytes, path: str = "/v1/completions", **headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, "POST", Content_Length=len(content), **headers) + content


def rest(connection: socket.socket) -> bytes:
    """Return the bytes until the server closes the connection, even if it has not read everything."""
    received = bytearray()
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def send(address: Address, content: bytes) -> bytes:
    """Send bytes and return all that comes until the server closes the connection or its time is over."""
    with connected(address) as connection:
        with suppress(OSError):  # the server may refuse before it has all
            connection.sendall(content)
        return rest(connection)


def statuses(received: bytes) -> list[int]:
    """Return the statuses of all answers. One may follow the body of another without a line's end."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", received)]

"""Bytes that are no request, half a request or several: each connection ends and leaves nothing behind."""

import contextlib
import socket
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.conftest import Target, faults
from tests.hostile.wire import connected, head, request, rest, send, statuses

BODY = b'{"prompt":"x","max_tokens":1}'
WHOLE = request(BODY)
LAST = request(BODY, Connection="close")  # the server closes the connection after its answer
CHUNKED = head(Transfer_Encoding="chunked", Connection="close")

PARTS = {
    "nothing": b"",
    "half a request line": b"POST /v1/comp",
    "half a header": WHOLE[:40],
    "a head without its end": head(Content_Length=9)[:-2],
    "no body": head(Content_Length=len(BODY)),
    "half a body": WHOLE[:-5],
    "less than declared": request(BODY).replace(b"Content-Length: 29", b"Content-Length: 400"),
    "half a chunk's size": CHUNKED + b"1",
    "half a chunk": CHUNKED + b"1d\r\n" + BODY[:10],
    "chunks without their end": CHUNKED + b"1d\r\n" + BODY + b"\r\n",
    "half an upload": head("/v1/files", Content_Length=900, Content_Type="multipart/form-data; boundary=b")
    + b"--b\r\nContent-Dis",
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("is_shutdown", [False, True])
def test_client_that_ends_inside_a_request_leaves_nothing(
    target: Target, part: bytes, is_shutdown: bool
) -> None:
    with connected(target.address) as connection:
        connection.sendall(part)
        if is_shutdown:
            connection.shutdown(socket.SHUT_WR)


def test_clients_that_are_silent_inside_a_request_time_out(target: Target) -> None:
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connected(target.address)) for name in PARTS}
        for name, connection in connections.items():
            connection.sendall(PARTS[name])
        for name, connection in connections.items():
            if PARTS[name]:
                assert statuses(rest(connection)) == [408], name


INVALID = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "a NUL in a header": head(X_Odd="a\0b"),
    "a bare line feed in a name": b"POST / HTTP/1.1\r\nHost: localhost\r\nX-A\n: b\r\n\r\n",
    "a space before a colon": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length : 3\r\n\r\nabc",
    "two lengths": head(Content_Length=3).replace(
        b"Content-Length: 3", b"Content-Length: 3\r\nContent-Length: 30"
    )
    + b"abc",
    "a length and chunks": head(Content_Length=3, Transfer_Encoding="chunked") + b"0\r\n\r\n",
    "a negative length": head(Content_Length=-1) + BODY,
    "a length that is no number": head(Content_Length="0x1d") + BODY,
    "a length beyond all numbers": head(Content_Length="9" * 40) + BODY,
    "a chunk of negative size": CHUNKED + b"-1\r\n" + BODY,
    "a chunk beyond all numbers": CHUNKED + b"f" * 40 + b"\r\n" + BODY,
    "a chunk that is longer than it says": CHUNKED + b"2\r\n" + BODY + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_invalid_requests_are_refused(target: Target, content: bytes) -> None:
    assert set(statuses(send(target.address, content))) <= {400, 413}


def test_bytes_after_a_refused_request_are_not_read_as_a_request(target: Target) -> None:
    """Request smuggling: a proxy in front may have taken these bytes for the body."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = send(
        target.address,
        head(Content_Length=len(smuggled), Transfer_Encoding="chunked") + b"0\r\n\r\n" + smuggled,
    )
    assert b'"object"' not in received


def test_pipelined_requests_are_all_answered(target: Target) -> None:
    assert statuses(send(target.address, WHOLE * 50 + LAST)) == [200] * 51


def test_body_in_chunks_of_one_byte_is_read(target: Target) -> None:
    chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nX-Trailer: y\r\n\r\n"
    assert statuses(send(target.address, CHUNKED + chunks)) == [200]


@pytest.mark.parametrize("size", [60_000, 2_000_000])
def test_headers_above_the_size_limit_are_refused(target: Target, size: int) -> None:
    flood = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(size // 110))
    received = send(
        target.address, head(Content_Length=len(BODY), Connection="close")[:-2] + flood + b"\r\n" + BODY
    )
    assert set(statuses(received)) <= ({200} if size < 64 * 1024 else {400, 431})


@pytest.mark.parametrize(
    "path",
    ["/" + "a" * 8000, "/%00", "/%ff%fe", "/v1/../v1/models", "//v1/models", "/v1/models/%2e%2e%2f", "*"],
)
def test_unknown_paths_are_refused(target: Target, path: str) -> None:
    assert statuses(send(target.address, head(path, "GET", Connection="close"))) in ([404], [400])


def test_many_half_open_connections_do_not_block_a_request(target: Target) -> None:
    with ExitStack() as stack:
        for index in range(200):
            stack.enter_context(connected(target.address)).sendall(WHOLE[: index % len(WHOLE)])
        assert statuses(send(target.address, LAST)) == [200]


def test_client_that_stops_reading_is_disconnected(target: Target) -> None:
    num_faults = faults(target.server.metrics())
    with connected(target.address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError):
            connection.sendall(head("/openapi.json", "GET") * 400)  # tens of megabytes of answers
        target.assert_unharmed(num_faults)  # while the connection is still open at this end


names = st.text(st.characters(codec="latin-1", exclude_characters=":\r\n"), min_size=1, max_size=20)
values = st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=50)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers=st.lists(st.tuples(names, values), max_size=8), body=st.binary(max_size=60))
def test_arbitrary_headers_and_bodies_cause_no_server_error(
    target: Target, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
    received = send(
        target.address, head(Content_Length=len(body), Connection="close")[:-2] + lines + b"\r\n" + body
    )
    assert all(status < 500 for status in statuses(received))

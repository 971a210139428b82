"""Responses of known bytes, cut at every position."""

from urllib.parse import urlsplit

import pytest

from commands.loadtest.recording import ConnectionCutError, Recording, post

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\n0\r\n\r\r\n0\r\n\r\n"


def recording(*pieces: bytes) -> Recording:
    return Recording(0.0, tuple((float(time), piece) for time, piece in enumerate(pieces, 1)))


def body_of(response: Recording) -> bytes:
    return b"".join(piece for _, piece in response.read()[1])


@pytest.mark.parametrize("position", range(1, len(CHUNKED)))
def test_a_response_is_the_same_for_every_cut_into_two_pieces(position: int) -> None:
    cut = recording(CHUNKED[:position], CHUNKED[position:])
    assert cut.read()[0] == 200
    assert body_of(cut) == b"abc0\r\n\r"


def test_every_piece_keeps_its_time_of_arrival() -> None:
    head, first, second = CHUNKED[:47], CHUNKED[47:55], CHUNKED[55:]
    assert first == b"3\r\nabc\r\n"
    assert recording(head, first, second).read()[1] == [(2.0, b"abc"), (3.0, b"0\r\n\r")]


@pytest.mark.parametrize("position", range(len(CHUNKED)))
def test_an_incomplete_response_raises(position: int) -> None:
    pieces = (CHUNKED[:position],) if position else ()
    with pytest.raises(ConnectionCutError):
        recording(*pieces).read()


def test_a_body_may_have_a_length_or_end_with_the_connection() -> None:
    assert body_of(recording(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")) == b"full"
    assert body_of(recording(b"HTTP/1.0 200 OK\r\n\r\nto the", b" end")) == b"to the end"
    with pytest.raises(ConnectionCutError, match="received 2 bytes, expected 4"):
        recording(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfu").read()


def test_bytes_that_are_not_http_raise() -> None:
    with pytest.raises(ConnectionCutError, match="illegal status line"):
        recording(b"220 mail ready\r\n\r\n").read()


def test_a_request_names_its_host_and_closes_its_connection() -> None:
    request = post(
        urlsplit("http://user@[::1]:8000/prefix"), "/v1/completions", [("Authorization", "Bearer a")], b"{}"
    )
    lines = request.split(b"\r\n")
    assert lines[0] == b"POST /prefix/v1/completions HTTP/1.1"
    assert set(lines[1:-2]) == {
        b"Host: [::1]:8000",
        b"Connection: close",
        b"Content-Length: 2",
        b"Authorization: Bearer a",
    }
    assert lines[-2:] == [b"", b"{}"]

"""Responses of known bytes, cut and joined in every way that a network may."""

from urllib.parse import urlsplit

import pytest

from commands.loadtest.recording import ConnectionCutError, Recording, post

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\n0\r\n\r\r\n0\r\n\r\n"


def recording(*pieces: bytes) -> Recording:
    return Recording(0.0, tuple((float(moment), piece) for moment, piece in enumerate(pieces, 1)))


def text(of: Recording) -> bytes:
    return b"".join(piece for _, piece in of.read()[1])


@pytest.mark.parametrize("place", range(1, len(CHUNKED)))
def test_a_response_means_the_same_wherever_it_was_cut(place: int) -> None:
    cut = recording(CHUNKED[:place], CHUNKED[place:])
    assert cut.read()[0] == 200
    assert text(cut) == b"abc0\r\n\r"


def test_every_piece_keeps_its_moment() -> None:
    head, first, second = CHUNKED[:47], CHUNKED[47:55], CHUNKED[55:]
    assert first == b"3\r\nabc\r\n"
    assert recording(head, first, second).read()[1] == [(2.0, b"abc"), (3.0, b"0\r\n\r")]


@pytest.mark.parametrize("place", range(len(CHUNKED)))
def test_a_response_that_was_cut_short_is_told_from_a_whole_one(place: int) -> None:
    pieces = (CHUNKED[:place],) if place else ()
    with pytest.raises(ConnectionCutError):
        recording(*pieces).read()


def test_a_body_may_have_a_length_or_end_with_the_connection() -> None:
    assert text(recording(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")) == b"full"
    assert text(recording(b"HTTP/1.0 200 OK\r\n\r\nto the", b" end")) == b"to the end"
    with pytest.raises(ConnectionCutError, match="received 2 bytes, expected 4"):
        recording(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfu").read()


def test_what_is_not_http_is_no_response() -> None:
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

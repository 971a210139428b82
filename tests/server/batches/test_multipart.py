"""The form of an upload: the same for any pieces, and refused if it is invalid."""

from collections.abc import Iterable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.batches.multipart import UploadForm
from server.http.errors import ApiError


def encoded(fields: dict[str, str], files: Iterable[tuple[str, tuple[str, bytes]]]) -> tuple[str, bytes]:
    """Return the content type and body that a client makes of a form."""
    request = httpx.Request("POST", "http://x", data=fields, files=list(files))
    return request.headers["content-type"], request.read()


def read(content_type: str, pieces: Iterable[bytes]) -> tuple[UploadForm, bytes]:
    form = UploadForm(content_type)
    return form, b"".join(map(form.feed, pieces))


@given(
    content=st.binary(max_size=200)
    | st.lists(st.sampled_from([b"\r\n", b"--", b"\r\n--", b"bound", b"\n", b"x"]), max_size=20).map(
        b"".join
    ),
    filename=st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=20),
    size=st.integers(1, 64),
)
def test_every_split_of_a_form_gives_the_same(content: bytes, filename: str, size: int) -> None:
    content_type, body = encoded({"purpose": "batch"}, [("file", (filename, content))])
    form, read_content = read(
        content_type, (body[start : start + size] for start in range(0, len(body), size))
    )
    assert (read_content, form.fields, form.is_complete) == (content, {"purpose": b"batch"}, True)
    assert form.filename is not None


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b\\c.jsonl", "日本.jsonl"])
def test_a_file_name_is_stored_unchanged(name: str) -> None:
    form, _ = read(*pieces(*encoded({}, [("file", (name, b"x"))])))
    assert form.filename == name


def pieces(content_type: str, body: bytes) -> tuple[str, list[bytes]]:
    return content_type, [body]


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"purpose": "batch", "other": "x"}, [("file", ("a", b"x"))], "other"),
        ({"purpose": "b" * 300}, [("file", ("a", b"x"))], "purpose"),
        ({}, [("file", ("a", b"x")), ("file", ("b", b"y"))], "file"),
        ({"file": "text"}, [("purpose", ("a", b"x"))], "file"),
    ],
)
def test_forms_that_are_refused(
    fields: dict[str, str], files: list[tuple[str, tuple[str, bytes]]], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        read(*pieces(*encoded(fields, files)))
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        (f"multipart/form-data; boundary={'b' * 1000}", b""),
        ("multipart/form-data; boundary=b", b"no boundary at all"),
        ("multipart/form-data; boundary=b", b"--b\r\nno header\r\n\r\nx\r\n--b--"),
        ("multipart/form-data; boundary=b", b"--b\r\nX-Long: " + b"x" * 5000),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"X-Y: 1\r\n" * 20),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--b--',
        ),
    ],
)
def test_bodies_that_are_no_form(content_type: str, body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read(content_type, [body])
    assert refused.value.status == 400

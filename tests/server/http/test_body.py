"""What a body may be before it is parsed, and the headers that every answer has."""

from collections.abc import Iterator

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings

LIMIT = 2000
PATH = "/tokenize"


@pytest.fixture(scope="module")
def small(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer, settings(max_body_size=LIMIT)) as server:
        yield server


@pytest.fixture
def http(small: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=30) as client:
        yield client


def body(size: int) -> bytes:
    frame = b'{"prompt":""}'
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


def chunked(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), 100):
        yield content[start : start + 100]


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (LIMIT * 50, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_above_the_limit_is_refused(
    http: httpx.Client, size: int, status: int, is_chunked: bool
) -> None:
    content = chunked(body(size)) if is_chunked else body(size)
    response = http.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    if status == 413:
        assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/a+json"],
)
def test_json_by_any_of_its_names(http: httpx.Client, content_type: str) -> None:
    assert http.post(PATH, content=body(50), headers={"Content-Type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"],
)
def test_another_content_type(http: httpx.Client, content_type: str) -> None:
    response = http.post(PATH, content=body(50), headers={"Content-Type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_content_type"


def test_an_id_is_made_for_every_answer(http: httpx.Client) -> None:
    ids = [
        http.get(path).headers["x-request-id"]
        for path in ("/health", "/health", "/nothing", "/v1/models/other")
    ]
    assert len(set(ids)) == 4


def test_the_clients_request_id_is_returned(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-ID": "mine-42"}).headers["x-request-id"] == "mine-42"


@pytest.mark.parametrize("given", ["x" * 129, "a b", "", "\u00e9"])
def test_an_id_that_could_do_harm_does_not(http: httpx.Client, given: str) -> None:
    headers = {b"X-Request-ID": given.encode("latin-1")}
    assert http.get("/health", headers=headers).headers["x-request-id"] != given


def test_the_processing_time_is_reported(http: httpx.Client) -> None:
    assert http.get("/version").headers["openai-processing-ms"].isdigit()

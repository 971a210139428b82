"""API keys: deny by default, decided on the path that is routed on."""

from collections.abc import Iterator

import httpx
import pytest

from server.http.auth import KeyRing, key_name
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def guarded(renderer: Renderer) -> Iterator[RunningServer]:
    with serve(renderer, settings(api_keys=KEYS)) as server:
        yield server


@pytest.fixture
def http(guarded: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        yield client


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(http: httpx.Client, key: str) -> None:
    assert http.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/demo",
        "/metrics",
        "/tokenizer_info",
        "/openapi.json",
        "/nothing",
        "//health",
        "/health//",
        "/v1/models/",
        "/HEALTH",
    ],
)
def test_every_closed_path_is_denied(http: httpx.Client, guarded: RunningServer, path: str) -> None:
    response = http.get(guarded.url + path)  # whole, because httpx takes //health for a host
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_no_body_is_read_without_a_key(http: httpx.Client, path: str) -> None:
    assert http.post(path, content=b"x" * 1000).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/health/", "/ready", "/version"])
def test_open_paths_need_no_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Bearer \xff\xfe",
    ],
)
def test_wrong_credentials(http: httpx.Client, value: bytes) -> None:
    assert http.get("/v1/models", headers={b"Authorization": value}).status_code == 401


def test_the_scheme_may_be_written_in_any_case(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"Authorization": "bearer first-key"}).status_code == 200


def test_two_credentials_are_refused(http: httpx.Client) -> None:
    headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer wrong")]
    assert http.get("/v1/models", headers=headers).status_code == 401


def test_a_key_may_be_in_anthropics_header(http: httpx.Client) -> None:
    def status(*headers: tuple[str, str]) -> int:
        return http.get("/v1/models", headers=list(headers)).status_code

    key, wrong = ("x-api-key", "first-key"), ("x-api-key", "wrong")
    assert status(key) == status(key, ("Authorization", "Bearer any")) == 200
    assert status(wrong, ("Authorization", "Bearer first-key")) == 200
    assert status(wrong) == status(("x-api-key", "")) == status(key, wrong) == 401


@pytest.mark.parametrize("host", ["localhost/health?", "x/health#", "evil.example/version"])
def test_the_host_header_decides_nothing(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code in (400, 401)


def test_an_answer_does_not_quote_the_key(http: httpx.Client) -> None:
    assert "wrong-key" not in http.get("/v1/models", headers=bearer("wrong-key")).text


def test_metrics_can_be_open(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=KEYS, metrics_require_key=False)) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_a_ring_keeps_no_key_in_the_clear() -> None:
    ring = KeyRing(KEYS)
    assert "first-key" not in repr(vars(ring))
    assert ring.name_of(b"first-key") == key_name("first-key") != key_name(KEYS[1])
    assert ring.name_of(b"") is None


def test_settings_do_not_print_keys() -> None:
    assert "first-key" not in repr(settings(api_keys=KEYS))

"""Which pages of other sites a browser lets read what the server answers."""

from collections.abc import Iterator

import httpx
import pytest

from server.text.renderer import Renderer
from tests.server.serving import serve, settings

SITE = "https://chat.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def open_to_one(renderer: Renderer) -> Iterator[httpx.Client]:
    with (
        serve(renderer, settings(allowed_origins=(SITE,), api_keys=("a-key",))) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def test_a_page_of_a_named_site_may_ask_with_its_key(open_to_one: httpx.Client) -> None:
    asked = open_to_one.options("/v1/chat/completions", headers={"Origin": SITE, **PREFLIGHT})
    assert (asked.status_code, asked.headers[ALLOWED]) == (200, SITE)
    assert {"authorization", "content-type"} <= {
        name.strip().lower() for name in asked.headers["access-control-allow-headers"].split(",")
    }
    assert "access-control-allow-credentials" not in asked.headers
    answer = open_to_one.get("/v1/models", headers={"Origin": SITE, "Authorization": "Bearer a-key"})
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, SITE)


def test_a_page_may_read_why_it_was_refused(open_to_one: httpx.Client) -> None:
    refused = open_to_one.post("/v1/chat/completions", json={}, headers={"Origin": SITE})
    assert (refused.status_code, refused.headers[ALLOWED]) == (401, SITE)


def test_pages_of_other_sites_may_not(open_to_one: httpx.Client) -> None:
    other = {"Origin": "https://chat.example.evil"}
    assert ALLOWED not in open_to_one.options("/v1/chat/completions", headers={**other, **PREFLIGHT}).headers
    assert ALLOWED not in open_to_one.get("/v1/models", headers=other).headers


def test_without_the_option_no_page_may(http: httpx.Client) -> None:
    answers = (
        http.options("/v1/models", headers={"Origin": SITE, **PREFLIGHT}),
        http.get("/v1/models", headers={"Origin": SITE}),
    )
    assert all(not name.startswith("access-control") for answer in answers for name in answer.headers)


def test_all_origins_can_be_allowed(renderer: Renderer) -> None:
    with serve(renderer, settings(allowed_origins=("*",))) as server:
        assert httpx.get(f"{server.url}/v1/models", headers={"Origin": SITE}).headers[ALLOWED] == "*"

"""Names in the Host header."""

import socket
from typing import Any

import httpx
import pytest

from server.http.hosts import allowed_hosts, is_this_machine
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, settings


def statuses(server: RunningServer, *hosts: str) -> list[int]:
    return [httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code for host in hosts]


def test_other_names_than_this_machines_are_refused(renderer: Renderer) -> None:
    with serve(renderer, settings(allowed_hosts=("models.example.com",))) as server:
        own = ("127.0.0.1", "localhost:8000", "LOCALHOST", "a.localhost", "[::1]:8000", "localhost.")
        assert set(statuses(server, *own, "Models.example.com:80")) == {200}
        others = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.0.1", "")
        assert set(statuses(server, *others)) == {403}
        answer = httpx.get(f"{server.url}/", headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_all_names_are_served_where_other_machines_reach_the_server(renderer: Renderer) -> None:
    with serve(renderer) as server:
        assert statuses(server, "evil.example") == [200]


def test_other_names_are_refused_only_where_a_page_could_reach_a_server_without_keys() -> None:
    def hosts(**changes: Any) -> tuple[str, ...] | None:
        return allowed_hosts(settings(**{"host": "127.0.0.1"} | changes))

    assert hosts() == hosts(host="::1") == ()
    assert hosts(api_keys=("key",)) is hosts(host="0.0.0.0") is None
    assert hosts(allowed_hosts=("a.example",), api_keys=("key",)) == ("a.example",)
    assert hosts(allowed_hosts=("*",)) is None


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        "GET /v1/models\r\n\r\n",  # HTTP/0.9
    ],
)
def test_two_host_headers_and_no_version_are_bad_requests(running: RunningServer, request_text: str) -> None:
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request_text.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_which_names_lead_here() -> None:
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "x.localhost")))
    assert not any(map(is_this_machine, ("0.0.0.0", "::", "example.com", "10.0.0.1", "localhost.com")))

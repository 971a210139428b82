"""What is counted of HTTP requests, over a small application."""

from fastapi import FastAPI
from starlette.testclient import TestClient

from backends.clock import VirtualClock
from server.http.observers import HttpMeter


class Seen:
    def __init__(self) -> None:
        self.answers: list[tuple[str, str, int, float]] = []

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        self.answers.append((method, handler, status, seconds))


def test_requests_are_counted_by_route_and_timed_to_their_end() -> None:
    clock, seen, app = VirtualClock(), Seen(), FastAPI()

    @app.get("/things/{name}")
    async def thing(name: str) -> str:
        clock.elapse(2.0)
        return name

    with TestClient(HttpMeter(app, seen, clock.now)) as client:
        client.get("/things/a")
        client.get("/things/b")
        client.get("/nowhere/../../etc")
        client.request("BREW", "/things/c")
    assert seen.answers == [
        ("GET", "/things/{name}", 200, 2.0),
        ("GET", "/things/{name}", 200, 2.0),
        ("GET", "unmatched", 404, 0.0),
        ("other", "/things/{name}", 405, 0.0),
    ]


async def test_a_disconnected_client_is_counted() -> None:
    seen = Seen()

    async def app(*_: object) -> None:
        return

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    await HttpMeter(app, seen, VirtualClock().now)({"type": "http", "method": "POST"}, nothing, nothing)  # type: ignore[arg-type]
    assert seen.answers == [("POST", "unmatched", 499, 0.0)]

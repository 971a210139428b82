"""A disconnect ends its request at the next step, streamed or not, running or queued, and no other one."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason
from server.text.renderer import Renderer
from tests.server.serving import RunningServer, serve, spec

LONG: dict[str, Any] = {"prompt": "Anna keeps", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(renderer: Renderer) -> Iterator[RunningServer]:
    """One slot, one place in the queue, and a device whose steps the test starts."""
    config = SchedulerConfig(max_num_waiting=1)
    with serve(
        renderer, backend_spec=spec(num_slots=1, max_decode_steps=1), config=config, is_open=False
    ) as running:
        yield running


@contextlib.contextmanager
def sent(server: RunningServer, path: str = "/v1/completions", **body: Any) -> Iterator[socket.socket]:
    """Send a request and leave without waiting for its answer."""
    content = json.dumps(LONG | body if path == "/v1/completions" else body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def step_until(server: RunningServer, num_requests: int, num_running: int, num_waiting: int) -> None:
    """Wait until requests have a ticket, then step until this number of sequences runs and waits."""
    observed = server.observed
    observed.wait_until(lambda: observed.num_reserved == num_requests)
    for _ in range(100):
        last = observed.last_step
        if last is not None and (last.stats.num_running, last.stats.num_waiting) == (
            num_running,
            num_waiting,
        ):
            return
        server.gate.let(1)
        observed.wait_for_step_after(last)
    raise AssertionError(
        f"{num_running} running and {num_waiting} waiting did not come: {observed.last_step}"
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends(server: RunningServer, stream: bool, n: int) -> None:
    with sent(server, stream=stream, n=n) as connection:
        step_until(server, 1, 1, n - 1)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
    assert server.observed.statuses == [200 if stream else 499]
    server.gate.open()
    server.observed.wait_until(lambda: len(server.observed.finals) == n)
    assert {final.reason for final in server.observed.finals} == {FinishReason.ABORT}
    assert max(final.num_output_tokens for final in server.observed.finals) < 10
    assert httpx.post(f"{server.url}/v1/completions", json=LONG | {"n": 2}, timeout=30).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_ends_with_its_client_and_is_not_stored(server: RunningServer, stream: bool) -> None:
    body: dict[str, Any] = {"input": "Anna keeps", "max_output_tokens": 500, "ignore_eos": True}
    with sent(server, "/v1/responses", stream=stream, **body) as connection:
        step_until(server, 1, 1, 0)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
    server.gate.open()
    server.observed.wait_until(lambda: len(server.observed.finals) == 1)
    assert server.observed.finals[0].reason is FinishReason.ABORT
    assert (
        httpx.post(f"{server.url}/v1/responses", json=body | {"max_output_tokens": 2}, timeout=30).status_code
        == 200
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_ends_with_its_client_and_the_running_one_continues(
    server: RunningServer, stream: bool
) -> None:
    with sent(server) as first:
        step_until(server, 1, 1, 0)
        with sent(server, stream=stream):
            step_until(server, 2, 1, 1)
        server.observed.wait_until(lambda: len(server.observed.statuses) == 1)
        server.gate.open()
        body = b""
        while b'"usage"' not in body:
            body += first.recv(65536)
    aborted, finished = server.observed.finals
    assert (aborted.reason, aborted.timing.admitted) == (FinishReason.ABORT, None)
    assert (finished.reason, finished.num_output_tokens) == (FinishReason.LENGTH, 500)


def test_a_client_that_reads_nothing_gives_its_place_back(server: RunningServer) -> None:
    """The answer is larger than the socket buffers: the server waits and must not hold a ticket."""
    with sent(server, stream=True, logprobs=20, n=2):
        server.gate.open()
        server.observed.wait_until(lambda: len(server.observed.finals) == 2)
        assert httpx.post(f"{server.url}/v1/completions", json=LONG | {"n": 2}, timeout=30).status_code == 200
    assert {final.reason for final in server.observed.finals} == {FinishReason.LENGTH}

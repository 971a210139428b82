"""Clients that disconnect at each stage of a request, and many at once: the server frees all they held."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests.hostile.conftest import READ_TIMEOUT, Target
from tests.hostile.wire import connected, head, request, rest, send, statuses

ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
LONG = {"prompt": "and then " * 1500, "max_tokens": 1}
NUM_CONNECTIONS = 8


def wait_until(target: Target, holds: Callable[[dict[str, float]], bool]) -> None:
    end = time.monotonic() + 60
    while not holds(target.server.metrics()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_disconnect_while_running_and_while_waiting(target: Target, is_stream: bool, is_reset: bool) -> None:
    with ExitStack() as stack:
        for index in range(4):  # two more than there are slots
            connection = stack.enter_context(connected(target.address))
            if is_reset:  # of the connection, instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            path = "/v1/responses" if index % 2 else "/v1/completions"
            body = {"input": "x", "max_output_tokens": 4000} if index % 2 else ENDLESS
            connection.sendall(request({**body, "stream": is_stream}, path))
        wait_until(
            target,
            lambda metrics: (
                metrics["snapserve:slots_in_use"] == 2 and metrics["vllm:num_requests_waiting"] == 2
            ),
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_disconnect_while_the_prompt_is_read(target: Target, path: str) -> None:
    body = LONG if path == "/v1/completions" else {"input": LONG["prompt"]}
    with connected(target.address) as connection:
        connection.sendall(request(body, path))
        wait_until(target, lambda metrics: metrics["snapserve:unread_prompt_tokens"] > 0)


def test_disconnect_while_the_grammar_is_compiled(target: Target) -> None:
    for index in range(20):
        with connected(target.address) as connection:
            connection.sendall(
                request({**ENDLESS, "structured_outputs": {"regex": f"(a|b{index}){{1,300}}c"}})
            )


def test_disconnect_in_the_middle_of_an_upload(target: Target) -> None:
    for size in (0, 60, 200_000):
        with connected(target.address) as connection:
            connection.sendall(
                head("/v1/files", Content_Type="multipart/form-data; boundary=b", Content_Length=900_000)
            )
            connection.sendall(
                (b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(size))[
                    : size or None
                ]
            )
    end = time.monotonic() + 60
    while uploads_are_refused(target):
        assert time.monotonic() < end
        time.sleep(0.05)


def uploads_are_refused(target: Target) -> bool:
    response = httpx.post(
        f"{target.url}/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}, timeout=60
    )
    if response.status_code == 200:
        httpx.delete(f"{target.url}/v1/files/{response.json()['id']}")
    return response.status_code != 200


def test_slow_uploads_do_not_block_others(target: Target) -> None:
    """As many as may be under way at once. Each is ended, although each sends a byte now and then."""
    start = head("/v1/files", Content_Type="multipart/form-data; boundary=b", Content_Length=900_000)
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(target.address)) for _ in range(8)]
        for connection in connections:
            connection.sendall(
                start + b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            )
        end = time.monotonic() + 20 * READ_TIMEOUT + 40
        while uploads_are_refused(target):
            assert time.monotonic() < end
            for connection in connections:
                with suppress(OSError):
                    connection.send(b"x")
            time.sleep(0.1)


def test_disconnect_without_reading_the_answer(target: Target) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(target.address)).sendall(request({"prompt": "x", "max_tokens": 1}))
        wait_until(target, lambda metrics: not metrics["snapserve:sequences_unfinished"])


def test_requests_above_the_queue_limit_get_429(target: Target) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(target.address)) for _ in range(30)]
        for connection in connections:
            connection.sendall(
                request({"prompt": "x", "max_tokens": 50, "ignore_eos": True}, Connection="close")
            )
        answered = [statuses(rest(connection)) for connection in connections]
    assert all(each in ([200], [429]) for each in answered)
    assert [200] in answered
    assert [429] in answered


@pytest.mark.parametrize("num_requests", [200, pytest.param(1_000, marks=pytest.mark.long)])
async def test_many_tiny_requests_get_one_answer(target: Target, num_requests: int) -> None:
    """Over a few connections, each request sent as soon as the one before is answered."""
    content = request({"prompt": "x", "max_tokens": 1, "temperature": 0})
    texts = set[bytes]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(*target.address)
        for _ in range(num_requests // NUM_CONNECTIONS):
            writer.write(content)
            answer_head = await reader.readuntil(b"\r\n\r\n")
            assert answer_head.startswith(b"HTTP/1.1 200 ")
            length = int(answer_head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            texts.add(body[body.index(b'"text"') : body.index(b'"finish_reason"')])
        writer.close()
        await writer.wait_closed()

    before = target.server.metrics()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CONNECTIONS):
            group.create_task(client())
    assert len(texts) == 1
    # A request is counted just after its last byte was sent, so the client may be first.
    name = "http_requests_total{/v1/completions,POST,200}"
    expected = before.get(name, 0) + num_requests
    await asyncio.to_thread(wait_until, target, lambda metrics: metrics[name] == expected)


def test_answers_do_not_depend_on_hostile_neighbours(target: Target) -> None:
    with ExitStack() as stack:
        stack.enter_context(connected(target.address)).sendall(request({**ENDLESS, "stream": True}))
        for part in (b"POST", head(Content_Length=5), b"\0" * 100):
            stack.enter_context(connected(target.address)).sendall(part)
        assert statuses(
            send(target.address, request({"prompt": "x", "max_tokens": 1}, Connection="close"))
        ) == [200]

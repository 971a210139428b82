"""Clients that keep a server busy until they are stopped."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

PAUSE = 0.2  # seconds between a client's requests
Send = Callable[[httpx.Client, int], None]


@contextmanager
def clients(url: str, num_clients: int, send: Send) -> Iterator[None]:
    """Run clients that each call `send(client, index)` again and again."""
    stop = threading.Event()

    def run(index: int) -> None:
        with httpx.Client(base_url=url, timeout=600) as client:
            while not stop.is_set():
                with suppress(httpx.TransportError):  # it was killed
                    send(client, index)
                stop.wait(PAUSE)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def complete(client: httpx.Client, prompt: str, max_tokens: int, **more: Any) -> int:
    """Request a completion of exactly `max_tokens` tokens and return the status."""
    body = {"model": "any", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | more
    return client.post("/v1/completions", json=body).status_code


def mixed(client: httpx.Client, index: int) -> None:
    """Send all kinds of requests that the dashboards show: short, long, with choices, aborted and invalid."""
    match index % 4:
        case 0:
            complete(client, "a short one", 24)
        case 1:
            complete(client, "a prompt that does not fit its slot, " * 40, 40, n=2)
        case 2:
            complete(client, "one that stops early", 48, stop=["a", "e"])
            complete(client, "one that cannot be", 0, n=-1)
        case _:
            body = {
                "model": "any",
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 200,
                "stream": True,
            }
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())


def eager(client: httpx.Client, index: int) -> None:
    """Request an answer of any length up to 40 tokens, so that slots do not become free together."""
    complete(client, "quick", 8 + index % 32)

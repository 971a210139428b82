"""Clients that keep a server busy until they are told to stop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

PAUSE = 0.2  # seconds between a client's requests
Ask = Callable[[httpx.Client, int], None]


@contextmanager
def clients(url: str, num_clients: int, ask: Ask) -> Iterator[None]:
    """Run clients, each asking one request after another; each is told its number."""
    stop = threading.Event()

    def run(number: int) -> None:
        with httpx.Client(base_url=url, timeout=600) as client:
            while not stop.is_set():
                with suppress(httpx.TransportError):  # it was killed
                    ask(client, number)
                stop.wait(PAUSE)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


def complete(client: httpx.Client, prompt: str, max_tokens: int, **more: Any) -> int:
    """Ask for a completion of exactly `max_tokens` and return the status."""
    body = {"model": "any", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | more
    return client.post("/v1/completions", json=body).status_code


def mixed(client: httpx.Client, number: int) -> None:
    """Short and long, one and several, whole and broken off, good and bad: everything that the dashboards have a panel for."""
    match number % 4:
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


def eager(client: httpx.Client, number: int) -> None:
    """Come back at once, answered or refused. Answers are of all lengths, so that slots do not come free together."""
    complete(client, "quick", 8 + number % 32)

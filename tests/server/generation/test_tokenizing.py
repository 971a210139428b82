"""One key's long texts hardly delay another key's, and end when their client leaves."""

import threading
import time

import httpx
import pytest

from server.options.settings import RateLimit
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.serving import serve, settings

LONG = {"prompt": "some words " * 25_000}
SHORT = {"messages": [{"role": "user", "content": "some words " * 300}]}


def ask(url: str, key: str, body: object, timeout: float = 60) -> float:
    start = time.monotonic()
    headers = {"Authorization": f"Bearer {key}"}
    httpx.post(f"{url}/tokenize", json=body, headers=headers, timeout=timeout).raise_for_status()
    return time.monotonic() - start


def test_a_flood_of_long_texts_does_not_hold_up_a_short_one(renderer: Renderer) -> None:
    with serve(renderer, settings(api_keys=("greedy", "modest"))) as server:
        flood = [threading.Thread(target=ask, args=(server.url, "greedy", LONG)) for _ in range(6)]
        start = time.monotonic()
        for thread in flood:
            thread.start()
        server.observed.wait_until(lambda: server.observed.num_reserved >= 6)
        took = ask(server.url, "modest", SHORT)
        for thread in flood:
            thread.join()
        whole = time.monotonic() - start
    assert took < whole / 2, (took, whole)


def test_a_client_that_leaves_stops_its_tokenizing(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, started = threading.Event(), []
    encode = Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        started.append(len(text))
        gate.wait(30)
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    with serve(renderer, settings(rate_limit=RateLimit())) as server:
        for _ in range(2):  # the second waits for the first
            with pytest.raises(httpx.ReadTimeout):
                ask(server.url, "any", {"prompt": "a" * 10_000}, timeout=0.5)
        server.observed.wait_until(lambda: len(server.observed.statuses) == 2)
        gate.set()
        ask(server.url, "any", {"prompt": "b" * 10_001})
        assert started == [10_000, 10_001]
        assert server.observed.statuses[:2] == [499, 499]

"""Measure how much one key's flood slows another key: its requests' times beside it, and alone.

Two floods: of generations, by which slots and prefill are shared, and of `/tokenize`, by which tokenizing is.
The other key sends one short chat after the other, with a pause before each. Each round measures it alone and
then beside the flood, from the flood's first answer on. The aim is a ratio of the two medians of at most 1.5,
in the median of the rounds.

The flood's clients are a process of the lowest priority, which comes nearest to clients on other machines.

Usage: `python -m bench.two_keys MODEL_DIR [--rounds 5] [--requests 10] [--flood 12] [--pause 0.2]
[--json FILE]`, or with `--url URL --keys GREEDY MODEST` against a server that runs.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import Any

import httpx

from bench.systems.servers import serving, snapserve
from bench.systems.system import MeasurementError

AIM = 1.5
KEYS = ("greedy-key", "modest-key")


def _chat(num_words: int, max_tokens: int) -> dict[str, Any]:
    """Return a chat whose prompt no other one begins with: nothing of it is restored."""
    content = uuid.uuid4().hex + " some words" * (num_words // 2)
    return {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "ignore_eos": True}


def _long_text() -> dict[str, Any]:
    return {"prompt": "some words " * 90_000}


FLOODS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "generations": ("/v1/chat/completions", lambda: _chat(4000, 64)),
    "tokenizing": ("/tokenize", _long_text),
}


@dataclass(frozen=True, slots=True)
class Row:
    """The modest key's median seconds a request in each round, alone and beside the greedy key's flood."""

    flood: str
    alone: tuple[float, ...]
    beside: tuple[float, ...]
    num_flood_answers: int

    @property
    def ratios(self) -> list[float]:
        return [beside / alone for alone, beside in zip(self.alone, self.beside, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class TwoKeys:
    """A greedy and a modest client of one server."""

    def __init__(self, url: str, greedy: str, modest: str, pause: float = 0.0) -> None:
        self._url = url
        self._pause = pause  # seconds before each modest request
        self._greedy = greedy
        self._modest = modest

    def measure(self, flood: str, num_rounds: int, num_requests: int, num_flooding: int) -> Row:
        """Return one row. Prints a line after each round.

        Raises `httpx.HTTPStatusError` for a refused modest request, and `MeasurementError` without a flood.
        """
        alone, beside, num_answers = [], [], 0
        self._median(2)  # what is loaded at its first use
        for number in range(1, num_rounds + 1):
            alone.append(self._median(num_requests))
            with self.flooded(flood, num_flooding) as answers:
                beside.append(self._median(num_requests))
            num_answers += answers.get_value()
            times = f"{alone[-1]:.3f} s alone, {beside[-1]:.3f} s beside it"
            print(f"{flood}, round {number} of {num_rounds}: {times}", flush=True)
        return Row(flood, tuple(alone), tuple(beside), num_answers)

    def _median(self, num_requests: int) -> float:
        seconds = []
        with _client(self._url, self._modest) as client:
            for _ in range(num_requests):
                time.sleep(self._pause)
                start = time.monotonic()
                client.post("/v1/chat/completions", json=_chat(100, 16)).raise_for_status()
                seconds.append(time.monotonic() - start)
        return statistics.median(seconds)

    @contextmanager
    def flooded(self, flood: str, num_flooding: int) -> Iterator[Semaphore]:
        """Send the greedy key's requests until the block ends, which begins after the first answer.

        Yield a semaphore that counts the answers.
        """
        context = multiprocessing.get_context("spawn")
        is_over, has_answered, answers = context.Event(), context.Event(), context.Semaphore(0)
        arguments = (self._url, self._greedy, flood, num_flooding, is_over, has_answered, answers)
        process = context.Process(target=_flood, args=arguments, daemon=True)
        process.start()
        try:
            while not has_answered.wait(timeout=1.0):
                if not process.is_alive():
                    raise MeasurementError("the flood ended before its first answer")
            yield answers
        finally:
            is_over.set()
            process.join()


def _flood(
    url: str, key: str, flood: str, num_flooding: int, is_over: Event, has_answered: Event, answers: Semaphore
) -> None:
    """Send requests in several threads until `is_over`. Signal the first answer, and count all."""
    os.nice(19)
    path, make_body = FLOODS[flood]

    def send() -> None:
        with _client(url, key) as client:
            while not is_over.is_set():
                client.post(path, json=make_body())
                answers.release()
                has_answered.set()

    threads = [threading.Thread(target=send) for _ in range(num_flooding)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _client(url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)


def table(rows: Sequence[Row]) -> str:
    lines = ["| flood | alone (s) | beside it (s) | ratio | lowest and highest |", "|---|---|---|---|---|"]
    for row in rows:
        alone, beside = (statistics.median(each) for each in (row.alone, row.beside))
        span = f"{min(row.ratios):.2f}, {max(row.ratios):.2f}"
        lines.append(f"| {row.flood} | {alone:.3f} | {beside:.3f} | {row.ratio:.2f} | {span} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--url")
    parser.add_argument("--keys", nargs=2, default=KEYS, metavar="KEY")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10, help="of the modest key, in each half of a round")
    parser.add_argument("--flood", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if (options.model is None) == (options.url is None):
        parser.error("give a model's folder or --url")

    def measured(url: str) -> list[Row]:
        greedy, modest = options.keys
        keys = TwoKeys(url, greedy, modest, options.pause)
        return [keys.measure(flood, options.rounds, options.requests, options.flood) for flood in FLOODS]

    if options.url is not None:
        rows = measured(options.url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            key_options = [word for key in options.keys for word in ("--api-key", key)]
            server = snapserve(options.model, *key_options, "--max-num-waiting", "256", "--require-compiled")
            with serving(server, Path(folder) / "log") as (url, _):
                rows = measured(url)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
    return 0 if all(row.ratio <= AIM for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

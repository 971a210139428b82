"""Measure how much one key's flood slows another key: its requests' times beside it, and alone.

Two floods: of generations, by which slots and prefill are shared, and of `/tokenize`, by which tokenizing is.
The other key sends one short chat after the other, with a pause before each. The aim is a median of at most
1.5 times its own alone. The machine must have cores to spare: on a busy one, the flood's own work is measured
too.

Usage: `python -m bench.two_keys MODEL_DIR [--requests 20] [--flood 12] [--pause 0.2] [--json FILE]`, or with
`--url URL --keys GREEDY MODEST` against a server that runs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.systems.servers import serving, snapserve

AIM = 1.5
KEYS = ("greedy-key", "modest-key")
SHORT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "some words " * 50}],
    "max_tokens": 16,
    "ignore_eos": True,
}
LONG_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "some words " * 2000}],
    "max_tokens": 64,
}
LONG_TEXT: dict[str, Any] = {"prompt": "some words " * 90_000}
FLOODS = {"generations": ("/v1/chat/completions", LONG_CHAT), "tokenizing": ("/tokenize", LONG_TEXT)}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the modest key's seconds a request, alone and beside the greedy key's flood."""

    flood: str
    alone: float
    beside: float
    num_flood_answers: int

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


class TwoKeys:
    """A greedy and a modest client of one server."""

    def __init__(self, url: str, greedy: str, modest: str, pause: float = 0.0) -> None:
        self._url = url
        self._pause = pause  # seconds before each modest request
        self._greedy = greedy
        self._modest = modest

    def measure(self, flood: str, num_requests: int, num_flooding: int) -> Row:
        """Return one row. Raises `httpx.HTTPStatusError` for a refused modest request."""
        path, body = FLOODS[flood]
        self._median(2)  # what is loaded at its first use
        alone = self._median(num_requests)
        with self._flooded(path, body, num_flooding) as answers:
            beside = self._median(num_requests)
        return Row(flood, alone, beside, len(answers))

    def _median(self, num_requests: int) -> float:
        seconds = []
        with self._client(self._modest) as client:
            for _ in range(num_requests):
                time.sleep(self._pause)
                start = time.monotonic()
                client.post("/v1/chat/completions", json=SHORT).raise_for_status()
                seconds.append(time.monotonic() - start)
        return statistics.median(seconds)

    @contextmanager
    def _flooded(self, path: str, body: dict[str, Any], num_flooding: int) -> Iterator[list[int]]:
        """Send the greedy key's requests in several threads until the block ends. Yield their statuses."""
        is_over, has_begun = threading.Event(), threading.Semaphore(0)
        statuses: list[int] = []

        def flood() -> None:
            with self._client(self._greedy) as client:
                has_begun.release()
                while not is_over.is_set():
                    statuses.append(client.post(path, json=body).status_code)

        threads = [threading.Thread(target=flood) for _ in range(num_flooding)]
        for thread in threads:
            thread.start()
        for _ in threads:
            has_begun.acquire()
        try:
            yield statuses
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers={"Authorization": f"Bearer {key}"}, timeout=600)


def table(rows: Sequence[Row]) -> str:
    lines = ["| flood | alone (s) | beside it (s) | ratio |", "|---|---|---|---|"]
    lines += [f"| {row.flood} | {row.alone:.3f} | {row.beside:.3f} | {row.ratio:.2f} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--url")
    parser.add_argument("--keys", nargs=2, default=KEYS, metavar="KEY")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--flood", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if (options.model is None) == (options.url is None):
        parser.error("give a model's folder or --url")

    def measured(url: str) -> list[Row]:
        greedy, modest = options.keys
        keys = TwoKeys(url, greedy, modest, options.pause)
        return [keys.measure(flood, options.requests, options.flood) for flood in FLOODS]

    if options.url is not None:
        rows = measured(options.url)
    else:
        with tempfile.TemporaryDirectory() as folder:
            key_options = [word for key in options.keys for word in ("--api-key", key)]
            server = snapserve(options.model, *key_options, "--max-num-waiting", "256")
            with serving(server, Path(folder) / "log") as (url, _):
                rows = measured(url)
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
    return 0 if all(row.ratio <= AIM for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

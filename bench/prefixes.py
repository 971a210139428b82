"""Measure what stored prompts save: times with them, as shares of the times without.

Rows: a prompt whose beginning is stored beside one that is new; a new prompt on a server that stores beside
one that does not; a chat of ten turns, on beside off; a document that is asked ten questions, the later ones
beside the first; a beginning stored in 8 bits beside an exact one; and blocks that a restarted server finds.
Other servers of `bench.peers` are measured with their own prefix caches, if they are installed. Prompts are
random token ids: speed does not depend on them.

Usage: `python -m bench.prefixes MODEL_DIR [--scale 1.0] [--vocab-size 31000] [--json FILE]`.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from bench.peers import add_servers, installed_servers, machine
from bench.systems.servers import Server, serving, snapserve
from bench.systems.system import MeasurementError

NUM_HITS = 5
NUM_TURNS = 10
FIRST_ID = 300
OFF = ("--prefix-cache-bytes", "0")
COMPILED = "--require-compiled"  # a first start would compile beside the first prompts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of each row's prompts, and different ones."""

    shared: int = 8064
    rest: int = 128
    turn: int = 500
    answer: int = 200
    document: int = 6000
    vocabulary: int = 31000

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        chat = NUM_TURNS * (self.turn + self.answer)
        return max(self.shared + self.rest, chat, self.document + self.rest) + 1

    def scaled(self, scale: float, vocabulary: int) -> "Sizes":
        scaled = {name: max(int(value * scale), 1) for name, value in asdict(self).items()}
        return Sizes(**scaled | {"vocabulary": vocabulary})


@dataclass(frozen=True, slots=True)
class Row:
    """`measured` and `base` in seconds; tokens for the restart."""

    server: str
    what: str
    measured: float
    base: float

    @property
    def ratio(self) -> float:
        return self.measured / self.base


@dataclass(frozen=True, slots=True)
class Answer:
    ttft: float  # seconds
    num_cached: int
    token_ids: tuple[int, ...]  # empty where the server does not return them


class Client:
    """Asks one server, one request at a time."""

    def __init__(self, server: Server, url: str, seed: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._extra = server.extra_body or {}
        self._http = httpx.Client(base_url=url, timeout=3600, trust_env=False)
        self._source = random.Random(seed)
        self._model = server.model or self._http.get("/v1/models").json()["data"][0]["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def new_ids(self, count: int) -> list[int]:
        return [self._source.randrange(FIRST_ID, self._vocabulary) for _ in range(count)]

    def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        """Raises `MeasurementError` for an answer that is not one."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self._extra,
        }
        ttft: float | None = None
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        start = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    ttft = ttft or time.perf_counter() - start
                    token_ids += choice.get("token_ids") or ()
            if response.status_code != 200 or ttft is None:
                raise MeasurementError(f"status {response.status_code}, and no answer")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(ttft, details.get("cached_tokens") or 0, tuple(token_ids))

    def hit_over_cold(self, sizes: Sizes) -> tuple[float, float]:
        """Return the median times to first token behind a stored beginning, and of new prompts."""
        hits, cold = zip(*(self.hit(sizes) for _ in range(NUM_HITS)), strict=True)
        return statistics.median(hits), statistics.median(cold)

    def hit(self, sizes: Sizes) -> tuple[float, float]:
        """Return the times to first token behind a stored beginning, and of the prompt that stored it."""
        shared = self.new_ids(sizes.shared)
        cold = self.ask(shared + self.new_ids(sizes.rest)).ttft
        return self.ask(shared + self.new_ids(sizes.rest)).ttft, cold

    def chat(self, sizes: Sizes) -> float:
        """Return the seconds of ten turns, each of which sends all turns before it."""
        history: list[int] = []
        start = time.perf_counter()
        for _ in range(NUM_TURNS):
            history += self.new_ids(sizes.turn)
            answer = self.ask(history, sizes.answer)
            history += answer.token_ids or self.new_ids(sizes.answer)
        return time.perf_counter() - start

    def questions(self, sizes: Sizes) -> tuple[float, float]:
        """Return the median time to first token of later questions about a document, and the first's."""
        document = self.new_ids(sizes.document)
        first, *others = (self.ask(document + self.new_ids(sizes.rest)).ttft for _ in range(10))
        return statistics.median(others), first


def our_rows(model: Path, sizes: Sizes, logs: Path) -> Iterator[Row]:
    # Slots that hold the whole chat, since only what lost nothing is stored.
    longest = str(sizes.longest)
    slots = ("--policy", "full", "--slot-capacity", longest, "--max-model-len", longest, COMPILED)
    on = snapserve(model, *slots)
    off = snapserve(model, *slots, *OFF)
    with serving(on, logs / "on.log") as (url, _), Client(on, url, 1, sizes.vocabulary) as client:
        client.ask(client.new_ids(sizes.rest))  # a first request is slower
        yield Row("snapserve", "first token: stored beginning over new", *client.hit_over_cold(sizes))
        yield Row("snapserve", "ten questions: later over first", *client.questions(sizes))
    # Of two servers of the same model, the one that started first may be a fifth slower: each is first once.
    (stores, reads), (reads_first, stores_second) = (
        _in_order(on, off, sizes, logs),
        _in_order(off, on, sizes, logs),
    )
    misses = statistics.median(stores.new + stores_second.new)
    without = statistics.median(reads.new + reads_first.new)
    yield Row("snapserve", "first token of a new prompt: on over off", misses, without)
    chats = stores.chat + stores_second.chat, reads.chat + reads_first.chat
    yield Row("snapserve", "two chats of ten turns: on over off", *chats)
    rounded = snapserve(model, *slots, "--prefix-cache-dtype", "int8")
    yield _rounded(rounded, on, sizes, logs)
    yield _restart(model, sizes, logs)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: those to the first token of new prompts, and those of a chat."""

    new: list[float]
    chat: float


@contextmanager
def _two_clients(first: Server, second: Server, sizes: Sizes, logs: Path) -> Iterator[tuple[Client, Client]]:
    """Start two servers in this order. Each has answered once, since a first request is slower."""
    with (
        serving(first, logs / "first.log") as (one, _),
        serving(second, logs / "second.log") as (other, _),
        Client(first, one, 1, sizes.vocabulary) as client,
        Client(second, other, 1, sizes.vocabulary) as beside,
    ):
        for each in (client, beside):
            each.ask(each.new_ids(sizes.rest))
        yield client, beside


def _in_order(first: Server, second: Server, sizes: Sizes, logs: Path) -> tuple[Times, Times]:
    """Start two servers in this order, and measure both in turns."""
    with _two_clients(first, second, sizes, logs) as clients:
        new = [[each.ask(ids).ttft for each in clients] for ids in _new_prompts(clients[0], sizes)]
        chats = [each.chat(sizes) for each in clients]
    of_first, of_second = (Times([times[index] for times in new], chat) for index, chat in enumerate(chats))
    return of_first, of_second


def _rounded(rounded: Server, exact: Server, sizes: Sizes, logs: Path) -> Row:
    """Return the times to first token behind a beginning in 8 bits and behind an exact one, in turns."""
    with _two_clients(rounded, exact, sizes, logs) as clients:
        hits = [[each.hit(sizes)[0] for each in clients] for _ in range(NUM_HITS)]
    return Row(
        "snapserve",
        "first token: beginning in 8 bits over exact",
        *map(statistics.median, zip(*hits, strict=True)),
    )


def _new_prompts(client: Client, sizes: Sizes) -> list[list[int]]:
    return [client.new_ids(sizes.shared + sizes.rest) for _ in range(NUM_HITS)]


def _restart(model: Path, sizes: Sizes, logs: Path) -> Row:
    """Return how many tokens a restarted server finds, and how many it would find if it had gone on."""
    with tempfile.TemporaryDirectory() as folder:
        length = ("--max-model-len", str(sizes.longest))
        server = snapserve(model, *length, COMPILED, "--prefix-cache-dir", folder)
        cached = []
        prompt: list[int] = []
        for run in range(2):
            with (
                serving(server, logs / f"restart{run}.log") as (url, _),
                Client(server, url, 2, sizes.vocabulary) as client,
            ):
                prompt = prompt or client.new_ids(sizes.shared + sizes.rest)
                if run == 0:
                    client.ask(prompt)
                cached.append(client.ask(prompt).num_cached)
    return Row("snapserve", "restored tokens: after a restart over before it", cached[1], cached[0])


def their_rows(server: Server, sizes: Sizes, logs: Path) -> Iterator[Row]:
    """Yield the rows of another server, up to its first failure."""
    try:
        yield from _rows_of(server, sizes, logs)
    except (MeasurementError, httpx.HTTPError) as error:
        print(f"{server.name} has no further rows: {error}", file=sys.stderr)


def _rows_of(server: Server, sizes: Sizes, logs: Path) -> Iterator[Row]:
    with (
        serving(server, logs / f"{server.name.split()[0]}.log") as (url, _),
        Client(server, url, 1, sizes.vocabulary) as client,
    ):
        client.ask(client.new_ids(sizes.rest))
        yield Row(server.name, "first token: stored beginning over new", *client.hit_over_cold(sizes))
        start = client.chat(sizes)
        yield Row(server.name, "chat of ten turns: seconds", start, 1.0)
        yield Row(server.name, "ten questions: later over first", *client.questions(sizes))


def table(rows: Sequence[Row]) -> str:
    lines = ["| server | what | measured | base | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.server} | {row.what} | {row.measured:.4g} | {row.base:.4g} | **{row.ratio:.3f}** |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_servers(parser)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts' lengths (default: 1)")
    parser.add_argument("--vocab-size", type=int, default=31000, help="of the tokens sent (default: 31000)")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    sizes = Sizes().scaled(arguments.scale, arguments.vocab_size)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        others = (their_rows(server, sizes, logs) for server in installed_servers(arguments))
        for row in itertools.chain(our_rows(arguments.model, sizes, logs), *others):
            rows.append(row)
            print(table([row]).splitlines()[-1], file=sys.stderr)
            if arguments.json is not None:
                document = {
                    **machine(),
                    **asdict(sizes),
                    "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
                }
                arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One real server process with short time limits, and what must hold after every attack on it.

Its steps take a simulated machine's time, so an attack can meet requests that wait, are read or are answered.
Its tokens follow from the contents of its slots, so one slot mixed up changes the answer.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.process import Server, serve

MAX_BODY = 1024 * 1024
READ_TIMEOUT = 1.0
OPTIONS = (
    *("--backend", "sn40l", "--inner", "fake", "--time-scale", "0.2", "--sockets", "8"),
    *("--num-slots", "2", "--max-num-waiting", "8", "--prefill-chunk", "32", "--num-scratch", "1"),
    *("--max-body-size", str(MAX_BODY), "--max-file-size", str(2 * MAX_BODY)),
    *("--read-timeout", str(READ_TIMEOUT), "--write-timeout", "1", "--idle-timeout", "20"),
)
# Bytes of resident memory above the level of a server that has answered a request of each kind.
MAX_GROWTH = 96 * 1024 * 1024
PROMPT = {
    "prompt": "The code of the harbour is",
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 2,
}
HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "snapserve:sequences_unfinished",
    "snapserve:slots_in_use",
    "snapserve:scratch_in_use",
    "snapserve:unread_prompt_tokens",
)
SETTLING_TIME = 30.0  # seconds in which abandoned requests must be gone


@dataclass(frozen=True)
class Target:
    """The server, and its state before the first attack."""

    server: Server
    answer: object
    memory: float
    num_files: float

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def assert_unharmed(self, num_faults: float) -> None:
        """Check that the server holds nothing, met no fault, answers as before, and needs no more memory."""
        metrics = settled(self.server, self.num_files + 1)
        assert num_faults == faults(metrics)
        assert metrics["process_resident_memory_bytes"] < self.memory + MAX_GROWTH
        assert httpx.get(f"{self.url}/ready").status_code == 200
        assert complete(self.url) == self.answer


def complete(url: str) -> object:
    """Return the choices of an ordinary completion: texts, tokens and their log-probabilities."""
    response = httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def faults(metrics: dict[str, float]) -> float:
    """Return how many answers had a 5xx status."""
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith("http_requests_total{")
        and name.removesuffix("}").rpartition(",")[2].startswith("5")
    )


def settled(server: Server, num_files: float) -> dict[str, float]:
    """Return the metrics once the server holds no sequence, slot, scratch or connection of another client.

    Raises AssertionError after `SETTLING_TIME`.
    """
    end = time.monotonic() + SETTLING_TIME
    while True:
        metrics = server.metrics()
        held = {name: metrics[name] for name in HELD if metrics[name]}
        if metrics["process_open_fds"] > num_files:
            held["process_open_fds"] = metrics["process_open_fds"]
        if not held:
            return metrics
        assert time.monotonic() < end, (
            f"still held after {SETTLING_TIME:g} s: {held}; at most {num_files:g} files may be open"
        )
        time.sleep(0.05)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    with serve(*OPTIONS, "--batch-dir", str(folder / "batches"), log=folder / "log") as server:
        answer = complete(server.url)
        _use_everything(server.url)
        metrics = settled(server, float("inf"))
        yield Target(server, answer, metrics["process_resident_memory_bytes"], metrics["process_open_fds"])


@pytest.fixture(autouse=True)
def unharmed(target: Target) -> Iterator[None]:
    num_faults = faults(target.server.metrics())
    yield
    target.assert_unharmed(num_faults)


def _use_everything(url: str) -> None:
    """Send one request of each kind, so that everything that is loaded at its first use is loaded."""
    message = [{"role": "user", "content": "Which?"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    bodies: list[tuple[str, dict[str, object]]] = [
        (
            "/v1/chat/completions",
            {"messages": message, "max_tokens": 2, "tools": [tool], "tool_choice": "required"},
        ),
        (
            "/v1/chat/completions",
            {"messages": message, "max_tokens": 2, "structured_outputs": {"regex": "a+"}},
        ),
        ("/v1/responses", {"input": "Which?", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": "x"}),
    ]
    for path, body in bodies:
        assert httpx.post(url + path, json=body, timeout=60).status_code == 200, path
    assert (
        httpx.post(f"{url}/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}).status_code
        == 200
    )

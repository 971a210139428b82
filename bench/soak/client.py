"""A client of a soak: it sends requests with one key, reads or cancels the answers, and counts them."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.target import Target
from bench.soak.traffic import MAX_TOKENS, Request, batch_lines

POLL_INTERVAL: Final = 0.5  # seconds between two polls of a batch
PATIENCE: Final = 1.0  # most seconds until a client cancels, and until it retries
END_LIMIT: Final = (
    120.0  # seconds until a background response, or the file of a batch that has ended, is there
)
LINES_PER_BATCH: Final = 20
RETRYABLE: Final = (429, 503)
_HAS_ENDED: Final = ("completed", "failed", "expired", "cancelled")
_KINDS: Final = {"batches": "batch", "files": "file", "responses": "stored response"}
_IS_RUNNING: Final = ("queued", "in_progress")
# The engine's finish reasons by the API's.
_REASONS: Final = {"tool_calls": "stop", "completed": "stop", "incomplete": "length"}


class Client:
    """A client with one key. It sends each request to one of the servers at random, and cancels
    `share_cancelled` of its requests before their end. `lines` counts the lines of its batches.
    """

    def __init__(
        self, targets: Sequence[Target], lines: Ledger, key: str, rng: random.Random, share_cancelled: float
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(headers=headers, timeout=300, trust_env=False)
        self._targets = targets
        self._lines = lines
        self._key = key
        self._rng = rng
        self._share_cancelled = share_cancelled
        self._known_batches: set[str] = set()  # those that were there before, and those that were counted

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: Request) -> None:
        """Send a request, and perhaps cancel it. Read a stored response again, and wait for one that is made
        in the background.
        """
        target = self._rng.choice(self._targets)
        ledger = target.ledger
        is_sent = asyncio.Event()
        ending = Ending(
            request.kind,
            Outcome.CANCELLED,
            num_sequences=request.num_sequences,
            max_tokens=request.max_tokens,
            key=self._key,
        )
        ledger.sent()
        sending = asyncio.create_task(self._send(request, target, ledger, ending, is_sent))
        if self._rng.random() < self._share_cancelled:
            await is_sent.wait()
            await asyncio.wait({sending}, timeout=PATIENCE * self._rng.random() ** 2)
            sending.cancel()
        await asyncio.wait({sending})
        response = None if sending.cancelled() else await sending
        ledger.ended(ending)
        if ending.status in RETRYABLE:
            await asyncio.sleep(PATIENCE * self._rng.random())
        if ending.outcome is Outcome.ANSWERED and response is not None:
            if response["status"] in _IS_RUNNING:
                ledger.uncertain_sequences(1, MAX_TOKENS)
            await self._read_again(response, ledger)

    async def _send(
        self, request: Request, target: Target, ledger: Ledger, ending: Ending, is_sent: asyncio.Event
    ) -> dict[str, Any] | None:
        """Return the response, if one was stored."""

        async def trace(name: str, _: Mapping[str, Any]) -> None:
            if name == "http11.send_request_body.complete":
                is_sent.set()

        content = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
        http_request = self._http.build_request(
            "POST",
            target.base_url + request.path,
            content=content,
            headers={"Content-Type": "application/json"},
            extensions={"trace": trace},
        )
        try:
            response = await self._http.send(http_request, stream=True)
            try:
                body = await response.aread()
            finally:
                ending.status = response.status_code
                await response.aclose()
        except httpx.TransportError as error:
            _break_off(ending, target, ledger, error)
            return None
        finally:
            is_sent.set()
        return judge(ending, request, response.status_code, body)

    async def _read_again(self, response: Mapping[str, Any], ledger: Ledger) -> None:
        """Read a stored response at any server until it has ended."""
        end = time.monotonic() + END_LIMIT
        status = response["status"]
        while True:
            read = await self._recorded_request("GET", f"/v1/responses/{response['id']}")
            if read is not None and read.status_code == 404:
                ledger.faults["missing"] += 1
                return
            if read is not None and read.status_code == 200:
                status = read.json()["status"]
                if status not in _IS_RUNNING:
                    return
            if time.monotonic() > end:
                ledger.faults["endless"] += status in _IS_RUNNING
                return
            await asyncio.sleep(POLL_INTERVAL)

    # Batches

    async def run_batch(self) -> None:
        """Upload a batch and wait for its end, and perhaps cancel it before."""
        lines = batch_lines(self._rng, LINES_PER_BATCH)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self._call(
            "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        )
        if file is None:
            await asyncio.sleep(POLL_INTERVAL)
            return
        order = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await self._call("POST", "/v1/batches", json=order)
        is_cancelled = self._rng.random() < self._share_cancelled
        while batch is not None and batch["status"] not in _HAS_ENDED:
            await asyncio.sleep(POLL_INTERVAL)
            if is_cancelled and batch["status"] == "in_progress":
                await self._call("POST", f"/v1/batches/{batch['id']}/cancel")
            batch = await self._call("GET", f"/v1/batches/{batch['id']}") or batch
        if batch is not None:
            await self._audit(batch)

    async def pass_over_batches(self) -> None:
        """Leave the batches alone that are there already."""
        self._known_batches = {batch["id"] for batch in await self._batches()}

    async def end_batches(self, time_limit: float) -> None:
        """Wait for the end of this key's batches that no client has seen, and count their lines too."""
        end = time.monotonic() + time_limit
        while True:
            batches = await self._batches()
            new = [batch for batch in batches if batch["id"] not in self._known_batches]
            ended = [batch for batch in new if batch["status"] in _HAS_ENDED]
            if len(ended) == len(new) or time.monotonic() > end:
                break
            await asyncio.sleep(POLL_INTERVAL)
        self._lines.faults["unfinished"] += len(new) - len(ended)
        for batch in ended:
            await self._audit(batch)

    async def _batches(self) -> list[dict[str, Any]]:
        batches: list[dict[str, Any]] = []
        after = ""
        while True:
            page = await self._call("GET", f"/v1/batches?limit=100{after}")
            if page is None:
                await asyncio.sleep(POLL_INTERVAL)
                continue
            batches += page["data"]
            if not page["has_more"]:
                return batches
            after = f"&after={page['last_id']}"

    async def _audit(self, batch: Mapping[str, Any]) -> None:
        """Count a batch that has ended, and delete its files."""
        self._known_batches.add(batch["id"])
        answers: dict[str, list[dict[str, Any]]] = {"completed": [], "failed": []}
        for kind, name in (("completed", "output_file_id"), ("failed", "error_file_id")):
            if batch.get(name) is not None:
                content = await self._fetch(batch[name])
                answers[kind] = [json.loads(line) for line in content.splitlines()]
                await self._call("DELETE", f"/v1/files/{batch[name]}")
        await self._call("DELETE", f"/v1/files/{batch['input_file_id']}")
        self._lines.ended_batch(batch, answers, {str(index) for index in range(LINES_PER_BATCH)})

    async def _fetch(self, file_id: str) -> str:
        end = time.monotonic() + END_LIMIT
        while True:
            response = await self._recorded_request("GET", f"/v1/files/{file_id}/content")
            if response is not None and response.status_code == 200:
                return response.text
            if time.monotonic() > end:
                raise TimeoutError(f"no content of file {file_id} after {END_LIMIT:.0f} s")
            await asyncio.sleep(POLL_INTERVAL)

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any] | None:
        """Return the answer to a request about files or batches, or None if it was rejected or lost."""
        response = await self._recorded_request(method, path, **options)
        return response.json() if response is not None and response.status_code == 200 else None

    async def _recorded_request(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Return the answer to a request that is not cancelled, or None if it was lost."""
        target = self._rng.choice(self._targets)
        ledger = target.ledger
        ending = Ending(_KINDS[path.partition("?")[0].split("/")[2]], Outcome.FAILED)
        ledger.sent()
        response = None
        try:
            response = await self._http.request(method, target.base_url + path, **options)
            ending.status = response.status_code
            ending.outcome = _outcome(response.status_code)
        except httpx.TransportError as error:
            _break_off(ending, target, ledger, error)
        ledger.ended(ending)
        return response


def _break_off(ending: Ending, target: Target, ledger: Ledger, error: httpx.TransportError) -> None:
    """Record how a request ended that has no whole answer: only a server that was killed may do that."""
    if target.ledger is not ledger:
        ending.outcome = Outcome.LOST
    elif isinstance(error, httpx.ConnectError) and not target.is_up:
        ending.outcome, ending.has_arrived = Outcome.LOST, False
    else:
        ending.outcome = Outcome.FAILED
        ledger.faults["broken"] += 1


def judge(ending: Ending, request: Request, status: int, body: bytes) -> dict[str, Any] | None:
    """Record how a request ended whose answer was read to its end. Returns the response, if one was stored.

    Raises ValueError for a wrong answer.
    """
    ending.outcome = _outcome(status)
    if status != 200:
        assert "error" in json.loads(body), (
            f"{request.path} answered {status} without an error: {body[:200]!r}"
        )
        return None
    answers = _events(body) if request.is_stream else [json.loads(body)]
    if any("error" in answer and answer["error"] for answer in answers) or any(
        answer.get("type") == "response.failed" for answer in answers
    ):
        ending.outcome = Outcome.FAILED
        return None
    ends: list[dict[str, Any]] = [
        answer.get("response", answer) for answer in answers if answer.get("type", _LAST[0]) in _LAST
    ]
    stored = next((answer for answer in ends if answer.get("object") == "response" and answer["store"]), None)
    if stored is not None and stored["status"] in _IS_RUNNING:
        return stored  # its sequence ends later
    for answer in ends:
        _count(ending, answer)
    if request.kind == "embedding":
        ending.finish_reasons["length"] = request.num_sequences
    if request.num_sequences != ending.finish_reasons.total():
        raise ValueError(
            f"{request.path}: expected {request.num_sequences} answers, got {ending.finish_reasons.total()}: "
            f"{body[-500:]!r}"
        )
    return stored


_LAST: Final = ("response.completed", "response.incomplete")


def _count(ending: Ending, answer: Mapping[str, Any]) -> None:
    reasons = [
        choice["finish_reason"] for choice in answer.get("choices", ()) if choice["finish_reason"] is not None
    ]
    if answer.get("object") == "response":
        reasons = [answer["status"]]
    ending.finish_reasons += Counter(_REASONS.get(reason, reason) for reason in reasons)
    usage = answer.get("usage") or {}
    ending.num_prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
    ending.num_output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


def _events(body: bytes) -> list[dict[str, Any]]:
    payloads = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(payload) for payload in payloads if payload != b"[DONE]"]


def _outcome(status: int) -> Outcome:
    if status == 200:
        return Outcome.ANSWERED
    return Outcome.REFUSED if status < 500 or status == 503 else Outcome.FAILED

"""A client of a soak: it sends requests with one key, reads or cancels the answers, and counts them."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import httpx

from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.traffic import MAX_TOKENS, Request, batch_lines

POLL_INTERVAL: Final = 0.5  # seconds between two polls of a batch
PATIENCE: Final = 1.0  # most seconds until a client cancels, and until it retries
RETRYABLE: Final = (429, 503)
_HAS_ENDED: Final = ("completed", "failed", "expired", "cancelled")
# The engine's finish reasons by the API's.
_REASONS: Final = {"tool_calls": "stop", "completed": "stop", "incomplete": "length"}


class Client:
    """A client with one key. It cancels `share_cancelled` of its requests before their end."""

    def __init__(
        self, base_url: str, key: str, ledger: Ledger, rng: random.Random, share_cancelled: float
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=300, trust_env=False)
        self._ledger = ledger
        self._rng = rng
        self._share_cancelled = share_cancelled

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: Request) -> None:
        """Send a request, and perhaps cancel it."""
        is_sent = asyncio.Event()
        ending = Ending(
            request.kind,
            Outcome.CANCELLED,
            num_sequences=request.num_sequences,
            max_tokens=request.max_tokens,
        )
        sending = asyncio.create_task(self._send(request, ending, is_sent))
        if self._rng.random() < self._share_cancelled:
            await is_sent.wait()
            await asyncio.wait({sending}, timeout=PATIENCE * self._rng.random() ** 2)
            sending.cancel()
        await asyncio.wait({sending})
        if not sending.cancelled():
            await sending
        self._ledger.ended(ending)
        if ending.status in RETRYABLE:
            await asyncio.sleep(PATIENCE * self._rng.random())

    async def _send(self, request: Request, ending: Ending, is_sent: asyncio.Event) -> None:
        async def trace(name: str, _: Mapping[str, Any]) -> None:
            if name == "http11.send_request_body.complete":
                is_sent.set()

        content = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
        http_request = self._http.build_request(
            "POST",
            request.path,
            content=content,
            headers={"Content-Type": "application/json"},
            extensions={"trace": trace},
        )
        self._ledger.sent()
        response = await self._http.send(http_request, stream=True)
        ending.status = response.status_code
        try:
            body = await response.aread()
        finally:
            await response.aclose()
        judge(ending, request, response.status_code, body)

    # Batches

    async def run_batch(self, num_lines: int) -> None:
        """Upload a batch and wait for its end, and perhaps cancel it before."""
        lines = batch_lines(self._rng, num_lines)
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self._call(
            "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        )
        if file is None:
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
            await self._count_lines(batch, num_lines)
        await self._call("DELETE", f"/v1/files/{file['id']}")

    async def _count_lines(self, batch: Mapping[str, Any], num_lines: int) -> None:
        for kind in ("completed", "failed"):
            self._ledger.num_lines[kind] += batch["request_counts"][kind]
        self._ledger.uncertain_sequences(num_lines - batch["request_counts"]["completed"], MAX_TOKENS)
        for file_id in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
            for line in (await self._fetch(file_id)).splitlines():
                response = json.loads(line)["response"]
                if response is not None and response["status_code"] == 200:
                    (choice,) = response["body"]["choices"]
                    usage = response["body"]["usage"]
                    self._ledger.counted_line(
                        choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
                    )
            await self._call("DELETE", f"/v1/files/{file_id}")

    async def _fetch(self, file_id: str) -> str:
        return (await self._recorded_request("GET", f"/v1/files/{file_id}/content")).text

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any] | None:
        """Return the answer to a request about files or batches, or None if it was rejected."""
        response = await self._recorded_request(method, path, **options)
        return response.json() if response.status_code == 200 else None

    async def _recorded_request(self, method: str, path: str, **options: Any) -> httpx.Response:
        self._ledger.sent()
        response = await self._http.request(method, path, **options)
        kind = "batch" if "batches" in path else "file"
        self._ledger.ended(Ending(kind, _outcome(response.status_code), response.status_code))
        return response


def judge(ending: Ending, request: Request, status: int, body: bytes) -> None:
    """Record how a request ended whose answer was read to its end. Raises ValueError for a wrong answer."""
    ending.outcome = _outcome(status)
    if status != 200:
        assert "error" in json.loads(body), (
            f"{request.path} answered {status} without an error: {body[:200]!r}"
        )
        return
    answers = _events(body) if request.is_stream else [json.loads(body)]
    if any("error" in answer and answer["error"] for answer in answers) or any(
        answer.get("type") == "response.failed" for answer in answers
    ):
        ending.outcome = Outcome.FAILED
        return
    for answer in answers:
        _count(
            ending,
            answer.get("response", answer) if answer.get("type", "response.completed") in _LAST else {},
        )
    if request.kind == "embedding":
        ending.finish_reasons["length"] = request.num_sequences
    if request.num_sequences != ending.finish_reasons.total():
        raise ValueError(
            f"{request.path}: expected {request.num_sequences} answers, got {ending.finish_reasons.total()}: "
            f"{body[-500:]!r}"
        )


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

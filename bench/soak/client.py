"""One client of a soak: sends requests with its key, reads the answers to their end or goes away before, and writes down what it saw."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import httpx

from bench.soak.ledger import Ending, Ledger, Outcome
from bench.soak.traffic import MAX_TOKENS, Ask, batch_lines

POLL_INTERVAL: Final = 0.5  # seconds between two looks at a batch
PATIENCE: Final = 1.0  # seconds at most, after which those who go away have gone
TRY_AGAIN: Final = (429, 503)
_HAS_ENDED: Final = ("completed", "failed", "expired", "cancelled")
_REASONS: Final = {
    "tool_calls": "stop",
    "completed": "stop",
    "incomplete": "length",
}  # the API's words for the engine's


class Client:
    """`share_cancelled` of its requests are given up before their end."""

    def __init__(
        self, base_url: str, key: str, ledger: Ledger, rng: random.Random, share_cancelled: float
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=300, trust_env=False)
        self._ledger, self._rng, self._share_cancelled = ledger, rng, share_cancelled

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask) -> None:
        """Send a request, and perhaps go away."""
        has_left = asyncio.Event()
        ending = Ending(
            ask.kind, Outcome.CANCELLED, num_sequences=ask.num_sequences, max_tokens=ask.max_tokens
        )
        sending = asyncio.create_task(self._send(ask, ending, has_left))
        if self._rng.random() < self._share_cancelled:
            await has_left.wait()
            await asyncio.wait({sending}, timeout=PATIENCE * self._rng.random() ** 2)
            sending.cancel()
        await asyncio.wait({sending})
        if not sending.cancelled():
            await sending
        self._ledger.ended(ending)
        if ending.status in TRY_AGAIN:
            await asyncio.sleep(PATIENCE * self._rng.random())

    async def _send(self, ask: Ask, ending: Ending, has_left: asyncio.Event) -> None:
        async def trace(name: str, _: Mapping[str, Any]) -> None:
            if name == "http11.send_request_body.complete":
                has_left.set()

        content = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        request = self._http.build_request(
            "POST",
            ask.path,
            content=content,
            headers={"Content-Type": "application/json"},
            extensions={"trace": trace},
        )
        self._ledger.sent()
        response = await self._http.send(request, stream=True)
        ending.status = response.status_code
        try:
            body = await response.aread()
        finally:
            await response.aclose()
        judge(ending, ask, response.status_code, body)

    # Batches

    async def run_batch(self, num_lines: int) -> None:
        """Take a batch from its upload to its end, and perhaps cancel it on the way."""
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
        self._ledger.untold_sequences(num_lines - batch["request_counts"]["completed"], MAX_TOKENS)
        for file_id in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
            for line in (await self._fetch(file_id)).splitlines():
                response = json.loads(line)["response"]
                if response is not None and response["status_code"] == 200:
                    (choice,), usage = response["body"]["choices"], response["body"]["usage"]
                    self._ledger.counted_line(
                        choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
                    )
            await self._call("DELETE", f"/v1/files/{file_id}")

    async def _fetch(self, file_id: str) -> str:
        return (await self._noted("GET", f"/v1/files/{file_id}/content")).text

    async def _call(self, method: str, path: str, **options: Any) -> dict[str, Any] | None:
        """Return what a request about files or batches is answered; None for a refusal."""
        response = await self._noted(method, path, **options)
        return response.json() if response.status_code == 200 else None

    async def _noted(self, method: str, path: str, **options: Any) -> httpx.Response:
        self._ledger.sent()
        response = await self._http.request(method, path, **options)
        kind = "batch" if "batches" in path else "file"
        self._ledger.ended(Ending(kind, _outcome(response.status_code), response.status_code))
        return response


def judge(ending: Ending, ask: Ask, status: int, body: bytes) -> None:
    """Write down how a request ended that was read to its end. Raises ValueError for an answer that is none."""
    ending.outcome = _outcome(status)
    if status != 200:
        assert "error" in json.loads(body), f"{ask.path} answered {status} without an error: {body[:200]!r}"
        return
    answers = _events(body) if ask.is_stream else [json.loads(body)]
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
    if ask.kind == "embedding":
        ending.finish_reasons["length"] = ask.num_sequences
    if ask.num_sequences != ending.finish_reasons.total():
        raise ValueError(
            f"{ask.num_sequences} answers were asked for, {ending.finish_reasons.total()} came: {body[-500:]!r}"
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

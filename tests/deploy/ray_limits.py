"""The ingress on Ray Serve with small limits on bodies.

What is behind the ingress answers with the length of what it got, so that no model is loaded.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import app
import httpx
from ray import cloudpickle, serve

KIB = 1024
LIMITS = {
    "MAX_BODY_BYTES": 10 * KIB,
    "MAX_PROMPT_BYTES": 4 * KIB,
    "MAX_UPLOADS_BYTES": 11 * KIB,
    "MAX_BODIES_BYTES": 16 * KIB,
    "MAX_BODY_SECONDS": 4.0,
}


class Counting:
    async def __call__(
        self, scope: Mapping[str, Any], body: bytearray, blocks: tuple[bytes, ...]
    ) -> AsyncIterator[list[Mapping[str, Any]]]:
        del scope, blocks
        yield [{"type": "http.response.start", "status": 200, "headers": []}]
        yield [{"type": "http.response.body", "body": str(len(body)).encode()}]


def application() -> serve.Application:
    """Return the ingress. The limits stay changed in this process."""
    assert LIMITS.keys() <= vars(app).keys()
    vars(app).update(LIMITS)
    cloudpickle.register_pickle_by_value(app)  # with these limits
    return serve.deployment(app.Ingress).bind(serve.deployment(Counting).bind())


async def outcome(sending: Any) -> tuple[int, str, str]:
    """Return the status of an answer, its text or its error's code, and when to retry."""
    answer = await sending
    text = answer.json()["error"]["code"] if answer.status_code >= 400 else answer.text
    return answer.status_code, text, answer.headers.get("retry-after", "")


async def slowly(content: bytes, seconds: float) -> AsyncIterator[bytes]:
    yield content
    await asyncio.sleep(seconds)
    yield b"."


async def scenario(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        def post(num_bytes: int) -> Any:
            return outcome(http.post("/v1/files", content=b"x" * num_bytes))

        found = {"largest": await post(10 * KIB), "too large": await post(10 * KIB + 1)}
        held = asyncio.create_task(outcome(http.post("/v1/files", content=slowly(b"x" * 6 * KIB, 8))))
        await asyncio.sleep(0.5)
        found |= {"upload beside an upload": await post(6 * KIB), "prompt beside an upload": await post(KIB)}
        found["slow"] = await held
        found["upload after it"] = await post(6 * KIB)
        gone = asyncio.create_task(http.post("/v1/files", content=slowly(b"x" * 6 * KIB, 8)))
        await asyncio.sleep(0.5)
        gone.cancel()
        await asyncio.wait({gone})
        await asyncio.sleep(0.5)
        found["upload after a client that left"] = await post(6 * KIB)
    return found

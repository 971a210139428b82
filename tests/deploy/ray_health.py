"""A replica on Ray Serve whose engine stalls: Ray must replace it."""

import asyncio
import os
import time
from typing import Any
from unittest.mock import patch

import app
import httpx
from ray import serve

TIME_LIMIT = 180.0  # seconds until another replica answers
# Twenty steps, and then one that takes an hour.
STALLING = {
    "SNAPSERVE_BACKEND": "sn40l",
    "SNAPSERVE_INNER": "fake",
    "SNAPSERVE_FAULT": "stalled-link=20:3600",
    "SNAPSERVE_STALL_TIMEOUT": "3",
}


class StallingReplica(app.Replica):
    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        os.environ.update(STALLING)
        await super().__init__()


def application() -> serve.Application:
    with patch.object(app, "Replica", StallingReplica):
        return app.build(app.Scale(min_replicas=1, max_replicas=1))


async def complete(http: httpx.AsyncClient, max_tokens: int) -> tuple[int, str | None]:
    """Return the status of an answer, and the code of its error."""
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    answer = await http.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.json().get("error", {}).get("code")


async def scenario(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=TIME_LIMIT) as http:
        before = await complete(http, 2)
        stalled = asyncio.create_task(complete(http, 200))
        start = time.monotonic()
        await stalled
        while (after := await complete(http, 2))[0] != 200:
            assert time.monotonic() - start < TIME_LIMIT, after
            await asyncio.sleep(1)
    return {
        "before": before,
        "stalled": stalled.result(),
        "after": after,
        "replaced_after": time.monotonic() - start,
    }

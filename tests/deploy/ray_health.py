"""A replica on Ray Serve whose engine stalls, in Ray's own environment: Ray must replace it."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from app import Scale, build
from ray import serve

from tests.deploy.ray_cluster import DEMO, cluster

TIME_LIMIT = 180.0  # seconds until another replica answers
# Twenty steps, and then one that takes an hour.
STALLING = {
    "SNAPSERVE_BACKEND": "sn40l",
    "SNAPSERVE_INNER": "fake",
    "SNAPSERVE_FAULT": "stalled-link=20:3600",
    "SNAPSERVE_STALL_TIMEOUT": "3",
}


async def complete(http: httpx.AsyncClient, max_tokens: int) -> tuple[int, str | None]:
    """Return the status of an answer, and the code of its error."""
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
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


def main(folder: Path) -> None:
    with cluster(folder, DEMO | STALLING) as url:
        serve.run(build(Scale(min_replicas=1, max_replicas=1)), name="snapserve")
        found = asyncio.run(scenario(url))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

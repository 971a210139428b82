"""Replicas on Ray Serve under load.

Scale up under 64 streams, shared prefixes, a replica killed amid streams, scale down beside a stream.
"""

import asyncio
import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import app
import httpx
import ray
from ray import serve

NUM_SLOTS = 8
NUM_STREAMS = 64
NUM_DYING = 12  # streams amid which a replica dies: few enough that all begin at once
NUM_LAST = 4  # clients amid whose streams a replica ends: half of one replica's slots
DOWNSCALE_DELAY = 20.0  # seconds of little load: longer than a replica takes to start
REPORT_TIME = 1.5  # seconds after which the router knows what load there is
ENVIRONMENT = {
    "SNAPSERVE_DTYPE": "float32",
    "SNAPSERVE_NUM_SLOTS": str(NUM_SLOTS),
    "SNAPSERVE_POLICY": "full",
    "SNAPSERVE_MAX_MODEL_LEN": "3072",
    "SNAPSERVE_MAX_NUM_WAITING": "256",
}
SENTENCES = (
    "The bells stayed near the theatre. ",
    "Marta keeps a brave falcon. ",
    "Celia plays a blue flute. ",
)


class LoadedReplica(app.Replica):
    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        os.environ.update(ENVIRONMENT)
        await super().__init__()


def application() -> serve.Application:
    scale = app.Scale(
        min_replicas=1, max_replicas=2, num_cpus=1, upscale_delay=1, downscale_delay=DOWNSCALE_DELAY
    )
    with patch.object(app, "Replica", LoadedReplica):
        return app.build(scale)


@dataclass
class Ended:
    """How one stream ended."""

    status: int
    text: str = ""
    errors: list[str] = field(default_factory=list)
    is_done: bool = False  # with [DONE]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


def prefix(number: int) -> str:
    """Return a text of some 300 tokens that begins unlike the others."""
    return f"Text {number}. " + "".join(SENTENCES[(number + index * index) % 3] for index in range(36))


async def stream(
    http: httpx.AsyncClient, prompt: str, max_tokens: int, started: asyncio.Event | None = None
) -> Ended:
    body = {
        "model": "snapserve-demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        ended = Ended(answer.status_code)
        if answer.status_code != 200:
            ended.errors.append((await answer.aread()).decode())
            return ended
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended.is_done = True
            elif line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    ended.errors.append(event["error"]["code"])
                ended.text += "".join(choice["text"] for choice in event.get("choices", ()))
                if started is not None and ended.text:
                    started.set()
                if event.get("usage"):
                    ended.num_prompt_tokens = event["usage"]["prompt_tokens"]
                    ended.num_cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ended


def outcome(ended: Ended) -> str:
    return f"{ended.status} {'done' if ended.is_done else ended.errors}"


def busiest_replica() -> ray.actor.ActorHandle:
    """Return the actor of the replica with the most requests."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    actors = [
        ray.get_actor(name, namespace="serve")
        for name in names
        if name.startswith("SERVE_REPLICA::") and "#LoadedReplica#" in name
    ]
    counts = ray.get([actor.get_num_ongoing_requests.remote() for actor in actors])
    return actors[counts.index(max(counts))]


def num_running() -> int:
    states = serve.status().applications["load"].deployments["LoadedReplica"].replica_states
    return int(states.get("RUNNING", 0))


async def until_running(count: int, seconds: float = 300) -> float:
    start = time.monotonic()
    while num_running() != count:
        assert time.monotonic() - start < seconds, serve.status()
        await asyncio.sleep(0.5)
    return time.monotonic() - start


async def until_replaced() -> None:
    """Wait until a replica has ended and another one runs, or until Ray no longer wants two of them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DOWNSCALE_DELAY + 5):
            await until_running(1)
            await until_running(2)


async def until_two_run(http: httpx.AsyncClient) -> None:
    """Send much load while it takes. Little load may have ended one."""
    while num_running() < 2:
        await asyncio.gather(*(stream(http, prefix(n), 64) for n in range(NUM_STREAMS)))


async def keep_sending(http: httpx.AsyncClient, prompt: str, stop: asyncio.Event) -> list[Ended]:
    """Stream one answer after the other. Returns them, the last of them begun before the stop."""
    all_ended = []
    while not stop.is_set():
        all_ended.append(await stream(http, prompt, 200))
    return all_ended


async def scenario(url: str) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        # Scale up under load.
        start = time.monotonic()
        flood = [asyncio.create_task(stream(http, prefix(n), 64)) for n in range(NUM_STREAMS)]
        scaled_up = await until_running(2)
        flooded = await asyncio.gather(*flood)
        flood_time = time.monotonic() - start
        # Each prefix once, so that it is stored, then as many at once as there are slots. The router may pass
        # over a replica where two requests wait for each slot.
        await asyncio.gather(*(stream(http, prefix(100 + n), 4) for n in range(8)))
        shared = [
            ended
            for first in range(0, NUM_STREAMS, 2 * NUM_SLOTS)
            for ended in await asyncio.gather(
                *(
                    stream(http, f"{prefix(100 + n % 8)} Question {n}?", 8)
                    for n in range(first, first + 2 * NUM_SLOTS)
                )
            )
        ]
        await asyncio.sleep(REPORT_TIME)
        # One replica dies amid streams.
        await until_two_run(http)
        begun = [asyncio.Event() for _ in range(NUM_DYING)]
        dying = [
            asyncio.create_task(stream(http, f"{n} is a number.", 400, begun[n])) for n in range(NUM_DYING)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        ray.kill(busiest_replica())
        replacing = asyncio.create_task(until_replaced())
        killed = await asyncio.gather(*dying)
        after = await asyncio.gather(*(stream(http, f"After {n}.", 8) for n in range(8)))
        await replacing
        await until_two_run(http)
        # With little load the surplus replica ends after its last requests. Both have some until then.
        is_scaled_down = asyncio.Event()
        last = [
            asyncio.create_task(keep_sending(http, f"The end {n}.", is_scaled_down)) for n in range(NUM_LAST)
        ]
        scaled_down = await until_running(1)
        is_scaled_down.set()
        all_last = [ended for task in last for ended in await task]
        health = (await http.get("/health")).status_code
    return {
        "scaled_up_after": scaled_up,
        "scaled_down_after": scaled_down,
        "tokens_per_second": NUM_STREAMS * 64 / flood_time,
        "flood": Counter(map(outcome, flooded)),
        "hit_rate": sum(each.num_cached_tokens > 0 for each in shared) / len(shared),
        "killed": [asdict(each) | {"text": len(each.text)} for each in killed],
        "after": Counter(map(outcome, after)),
        "last": Counter(map(outcome, all_last)),
        "health": health,
    }

"""snapserve on Ray Serve: an ingress, and replicas behind a router that knows their slots and prompts.

    cd deploy/ray && serve run app:build min_replicas=2            # on a cluster: serve deploy config.yaml

The server's options are the variables SNAPSERVE_….
"""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from router import MAX_PROMPT_BYTES, SlotRouter, blocks_of
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

MAX_BODY_BYTES = 256 * 1024 * 1024  # an upload; the server has lower limits for other requests
MAX_BODIES_BYTES = 1024 * 1024 * 1024  # of all requests that are being received or wait for a replica
MAX_UPLOADS_BYTES = 512 * 1024 * 1024  # of these, what large bodies may take: prompts need room beside them
MAX_BODY_SECONDS = 300.0  # for a whole body
MAX_MESSAGES = 64  # parts of an answer that Ray has not taken; for a slow client, Ray holds the rest
TARGET_LOAD = 0.75  # of the slots of all replicas
REPLICA_LOST = {
    "error": {
        "message": "The replica that served this request has ended. Please send it again.",
        "type": "server_error",
        "param": None,
        "code": "replica_lost",
    }
}


class Replica:
    """One server of a model, without an HTTP server."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        # Imported here, so that Ray's controller and the ingress need no PyTorch.
        from server.instance import Instance
        from server.options.serve import environment_config
        from server.serve import open_batches, prepare

        os.environ.setdefault("SNAPSERVE_REPLICA", serve.get_replica_context().replica_id.unique_id)
        config = environment_config()
        prepare(config)
        self._stack = contextlib.AsyncExitStack()
        batches = self._stack.enter_context(open_batches(config.server))
        self._instance = Instance(config, batches)
        self._stack.push_async_callback(self._instance.close)
        self._instance.start()
        health = await self._instance.wait_loaded()
        if not health.is_ready:
            raise RuntimeError(health.detail)
        self._num_slots = sum(pool.num_slots for pool in self._instance.spec.pools)

    async def __call__(
        self, scope: Mapping[str, Any], body: bytearray, blocks: tuple[bytes, ...]
    ) -> AsyncIterator[list[Mapping[str, Any]]]:
        """Answer one request. Yields the messages of its ASGI answer, those that are there together."""
        del blocks  # for the router
        to_client, messages = anyio.create_memory_object_stream[Mapping[str, Any]](MAX_MESSAGES)
        is_gone = asyncio.Event()
        parts = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def receive() -> dict[str, Any]:
            part = next(parts, None)
            if part is None:
                await is_gone.wait()
            return part or {"type": "http.disconnect"}

        async def answer() -> None:
            async with to_client:
                await self._instance.app(dict(scope), receive, to_client.send)

        answering = asyncio.create_task(answer())
        try:
            async for message in messages:
                ready = [message]
                with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
                    while True:
                        ready.append(messages.receive_nowait())
                yield ready
        finally:
            # At the end of the answer, or when the client has left.
            is_gone.set()
            try:
                await asyncio.wait({answering}, timeout=10)
            finally:
                answering.cancel()
                messages.close()

    def check_health(self) -> None:
        """Let Ray replace a replica whose engine is dead or makes no progress."""
        health = self._instance.health()
        if not health.is_alive:
            raise RuntimeError(f"the engine is {health.status.value}: {health.detail}")

    def record_routing_stats(self) -> dict[str, int]:
        num_busy, num_waiting = self._load()
        return {"num_slots": self._num_slots, "num_free": self._num_slots - num_busy - num_waiting}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"load": sum(self._load()) / self._num_slots}

    def _load(self) -> tuple[int, int]:
        load = self._instance.metrics.load()
        return round(load["kv_cache_usage_perc"] * self._num_slots), int(load["num_requests_waiting"])

    async def __del__(self) -> None:
        """Let running requests finish, when Ray ends the replica."""
        await self._instance.drain()
        await self._stack.aclose()


class Ingress:
    """Takes HTTP requests, reads what the router needs, and passes the answer on as it comes."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)
        self._num_bytes = 0  # of the bodies that are held

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        try:
            refusal = await self._receive(request, body)
            return refusal or await self._pass_on(request, body)
        finally:
            self._num_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> Response | None:
        """Append the request's body to `body`. Returns the error of one that is refused."""
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    self._num_bytes += len(piece)
                    if len(body) > MAX_BODY_BYTES:
                        return _refused(413, "request_too_large", "The body is too large.")
                    limit = MAX_BODIES_BYTES if len(body) <= MAX_PROMPT_BYTES else MAX_UPLOADS_BYTES
                    if self._num_bytes > limit:
                        return _refused(503, "server_overloaded", "Too many large requests. Try later.")
        except TimeoutError:
            return _refused(408, "request_timeout", "The body arrived too slowly.")
        except ClientDisconnect:
            return Response(status_code=400)
        return None

    async def _pass_on(self, request: Request, body: bytearray) -> Response:
        """Send a request to a replica, and return once the answer begins."""
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        owner = request.headers.get("authorization", "").encode()
        answer = self._replicas.remote(scope, body, blocks=blocks_of(body, owner))
        try:
            start, *ready = await anext(aiter(answer))
        except (RayError, StopAsyncIteration):
            return JSONResponse(REPLICA_LOST, 503, {"Retry-After": "1"})
        response = StreamingResponse(_pieces(answer, ready, start), start["status"])
        response.raw_headers = list(start["headers"])
        return response


_SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)


def _refused(status: int, code: str, message: str) -> Response:
    kind = "server_error" if status == 503 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"Retry-After": "1"} if status == 503 else {})


async def _pieces(
    answer: DeploymentResponseGenerator[list[Mapping[str, Any]]],
    ready: list[Mapping[str, Any]],
    start: Mapping[str, Any],
) -> AsyncIterator[bytes]:
    """Yield the body's pieces. The stream of a replica that dies ends with an error."""
    messages: Sequence[Mapping[str, Any]] = ready
    try:
        yield _body(messages)
        async for messages in answer:
            yield _body(messages)
    except RayError:
        if messages and not messages[-1].get("more_body", False):
            return  # the replica died after the whole answer
        headers = MutableHeaders(raw=list(start["headers"]))
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise  # the connection breaks off, short of the content's length
        yield b"data: " + json.dumps(REPLICA_LOST).encode() + b"\n\n"
    finally:
        answer.cancel()


def _body(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def by_slots(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas keep a quarter of the slots free."""
    load = sum((context.aggregated_metrics or {}).get("load", {}).values())
    num_replicas = math.ceil(load / TARGET_LOAD)
    return min(
        max(num_replicas, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas
    ), {}


class Scale(BaseModel):
    """The arguments of `build`. Times are seconds."""

    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1  # of one replica
    num_gpus: float = 0
    upscale_delay: float = 5
    downscale_delay: float = 120


def build(scale: Scale) -> serve.Application:
    replicas = serve.deployment(
        Replica,
        max_ongoing_requests=256,  # the server itself refuses what its queue does not take
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=60,
        request_router_config=RequestRouterConfig(
            request_router_class=SlotRouter,
            request_routing_stats_period_s=1,
            request_routing_stats_timeout_s=5,
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            metrics_interval_s=1,
            look_back_period_s=5,
            upscale_delay_s=scale.upscale_delay,
            downscale_delay_s=scale.downscale_delay,
            policy=AutoscalingPolicy(policy_function=by_slots),
        ),
    )
    ingress = serve.deployment(Ingress, max_ongoing_requests=2000, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas.bind())

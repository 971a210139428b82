"""`POST /v1/embeddings`: what the served model's last layer makes of each input, pooled to one vector of length 1.

Inputs take no slot, only a scratch while they are read. A request reserves as many places as inputs of it are in the engine at once, which
are few: a request with thousands of inputs must not take the whole queue.
"""

import asyncio
import base64
import math
import uuid
from collections.abc import Iterator
from contextlib import aclosing

import numpy as np
from fastapi import APIRouter, Response
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from backends.interface import SamplingParams
from scheduler.messages import Add, StopCriteria
from server.generation.checks import check_admissible, check_prompt, served_model
from server.generation.output import Embedding, Generation
from server.http.disconnect import run_until_disconnect
from server.http.errors import invalid_value, unsupported_parameter
from server.http.record import RequestRecord
from server.protocol.embeddings import EmbeddingList, EmbeddingObject, EmbeddingRequest
from server.services import Services
from server.text.renderer import RenderError

MAX_AT_ONCE = 8  # inputs of one request that are in the engine together


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=EmbeddingList)
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        return EmbeddingResponse(services, body, served_model(body.model, services.settings))

    return routes


class EmbeddingResponse(Response):
    """A response whose inputs are read while the client waits; if it goes away, they are not read on."""

    def __init__(self, services: Services, request: EmbeddingRequest, model: str) -> None:
        super().__init__()
        self._services, self._request, self._model = services, request, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_inputs, limit = len(self._request.inputs), self._services.settings.limits.max_embedding_inputs
        if num_inputs > limit:
            raise invalid_value(f"'input' is limited to {limit} by this server, got {num_inputs}.", "input")
        self._check_dimensions()
        num_at_once = min(num_inputs, MAX_AT_ONCE)
        record = RequestRecord.of(scope)
        record.model = self._model
        record.quota.admit()
        with self._services.client.reserve(num_at_once, record.tenant, in_background=record.is_background):
            adds = await self._adds(record)
            num_tokens = sum(len(add.prompt_token_ids) for add in adds)
            record.quota.reserve(num_tokens)
            record.num_prompt_tokens = num_tokens
            vectors = await self._vectors(adds, num_at_once)
        body: EmbeddingList = {
            "object": "list",
            "data": [self._object(index, vector) for index, vector in enumerate(vectors)],
            "model": self._model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        await JSONResponse(body)(scope, receive, send)

    def _check_dimensions(self) -> None:
        size, dimensions = self._services.client.spec.embedding_size, self._request.dimensions
        if size == 0:
            raise unsupported_parameter("input", "cannot be embedded by this server's backend")
        if dimensions is not None and dimensions > size:
            raise invalid_value(
                f"'dimensions' is {dimensions}, but this model's embeddings have {size}.", "dimensions"
            )

    async def _adds(self, record: RequestRecord) -> list[Add]:
        """Return what the engine is asked for, one request an input."""
        client, settings, name = self._services.client, self._services.settings, f"embd-{uuid.uuid4().hex}"
        adds = []
        for number, token_ids in enumerate(map(self._request.truncated, await self._encode())):
            check_prompt(token_ids, client.spec.vocab_size, "input")
            add = Add(
                request_id=f"{name}-{number}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0),
                stop=StopCriteria(max_tokens=0),
                arrival_time=client.now(),
                queue_timeout=settings.queue_timeout,
                timeout=settings.request_timeout,
                pooling=settings.embedding_pooling,
                tenant=record.tenant,
                is_background=record.is_background,
            )
            check_admissible(add, client.spec, "input")
            adds.append(add)
        return adds

    async def _encode(self) -> list[tuple[int, ...]]:
        add_special_tokens, renderer = self._request.add_special_tokens is not False, self._services.renderer
        try:
            return [
                await renderer.encode(item, add_special_tokens=add_special_tokens)
                if isinstance(item, str)
                else item
                for item in self._request.inputs
            ]
        except RenderError as error:
            raise invalid_value(str(error), "input") from error

    async def _vectors(self, adds: list[Add], num_at_once: int) -> list[tuple[float, ...]]:
        """Return the inputs' vectors. Raises what the first input that fails raises; the others are not read on."""
        vectors: list[tuple[float, ...]] = [()] * len(adds)
        unread = iter(enumerate(adds))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_at_once):
                    group.create_task(self._read(unread, vectors))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return vectors

    async def _read(self, unread: Iterator[tuple[int, Add]], vectors: list[tuple[float, ...]]) -> None:
        for number, add in unread:
            async with aclosing(Generation(self._services.client, self._services.renderer, add)) as events:
                async for event in events:
                    if isinstance(event, Embedding):
                        vectors[number] = event.vector

    def _object(self, index: int, vector: tuple[float, ...]) -> EmbeddingObject:
        """Return an embedding: its first `dimensions` numbers, as long as 1 together (Matryoshka, as OpenAI's)."""
        numbers = vector[: self._request.dimensions]
        length = math.hypot(*numbers) or 1.0
        unit = [number / length for number in numbers]
        if self._request.encoding_format == "base64":
            return {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(np.asarray(unit, "<f4").tobytes()).decode(),
            }
        return {"object": "embedding", "index": index, "embedding": unit}

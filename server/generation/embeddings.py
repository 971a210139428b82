"""Embeddings: the last hidden states of each input, pooled to one vector of length 1.

Inputs take no slot, only a scratch while they are read. The engine gets few of them at once, because a
request with thousands of inputs must not fill the queue.
"""

import base64
import math
import uuid

import numpy as np

from backends.interface import BackendSpec
from server.generation.admission import check_count
from server.generation.events import Embedding, Event
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Task
from server.http.errors import invalid_value, unsupported_parameter
from server.options.settings import ServerSettings
from server.protocol.embeddings import EmbeddingList, EmbeddingObject, EmbeddingRequest
from server.protocol.generation import GenerationRequest
from server.text.renderer import Renderer

MAX_IN_FLIGHT = 8  # inputs of one request that the engine has at once


def embedding_task(
    request: EmbeddingRequest,
    model: str,
    settings: ServerSettings,
    spec: BackendSpec,
    make_body: "type[EmbeddingBody] | None" = None,
) -> Task:
    """Return the task of an embeddings request. Raises `ApiError`."""
    make = make_body or EmbeddingBody
    check_count("input", len(request.inputs), settings.limits.max_embedding_inputs)
    _check_dimensions(request, spec)

    async def render(renderer: Renderer) -> Rendered:
        add_special_tokens = request.add_special_tokens is not False
        prompts = [
            await renderer.encode(item, add_special_tokens=add_special_tokens)
            if isinstance(item, str)
            else item
            for item in request.inputs
        ]
        truncated = tuple(request.truncated(prompt, spec.max_model_len) for prompt in prompts)
        return Rendered(truncated, body=lambda: make(request, model))

    return Task(
        id=f"embd-{uuid.uuid4().hex}",
        model=model,
        options=GenerationRequest(temperature=0.0),
        num_prompts=len(request.inputs),
        prompt_param="input",
        max_tokens=lambda _: 0,
        render=render,
        pooling=settings.api.embedding_pooling,
        max_in_flight=MAX_IN_FLIGHT,
        truncates=request.truncate_prompt_tokens is not None,
    )


class EmbeddingBody:
    """Collects the vectors of all inputs."""

    def __init__(self, request: EmbeddingRequest, model: str) -> None:
        self._request = request
        self._model = model
        self._vectors: list[tuple[float, ...]] = [()] * len(request.inputs)

    def add(self, prompt: int, event: Event, _: Tally) -> None:
        if isinstance(event, Embedding):
            self._vectors[prompt] = event.vector

    async def body(self, tally: Tally) -> Payload:
        num_tokens = sum(tally.num_prompt_tokens)
        whole: EmbeddingList = {
            "object": "list",
            "data": [self._object(index, vector) for index, vector in enumerate(self._vectors)],
            "model": self._model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return whole

    def vectors(self) -> list[list[float]]:
        """Return the first `dimensions` numbers of each, scaled to length 1: Matryoshka embeddings."""
        return [self._unit(vector) for vector in self._vectors]

    def _unit(self, vector: tuple[float, ...]) -> list[float]:
        numbers = vector[: self._request.dimensions]
        length = math.hypot(*numbers) or 1.0
        return [number / length for number in numbers]

    def _object(self, index: int, vector: tuple[float, ...]) -> EmbeddingObject:
        unit = self._unit(vector)
        if self._request.encoding_format == "base64":
            encoded = base64.b64encode(np.asarray(unit, "<f4").tobytes()).decode()
            return {"object": "embedding", "index": index, "embedding": encoded}
        return {"object": "embedding", "index": index, "embedding": unit}


def _check_dimensions(request: EmbeddingRequest, spec: BackendSpec) -> None:
    size = spec.embedding_size
    dimensions = request.dimensions
    if size == 0:
        raise unsupported_parameter("input", "cannot be embedded by this server's backend")
    if dimensions is not None and dimensions > size:
        raise invalid_value(
            f"'dimensions' is {dimensions}, but this model's embeddings have {size}.", "dimensions"
        )

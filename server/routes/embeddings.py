"""`POST /v1/embeddings`."""

from fastapi import APIRouter, Response

from server.generation.admission import served_model
from server.generation.embeddings import embedding_task
from server.generation.response import GenerationResponse
from server.protocol.embeddings import EmbeddingList, EmbeddingRequest
from server.services import Services


def answer(body: EmbeddingRequest, services: Services) -> GenerationResponse:
    """Return the answer to a request. Raises `ApiError`."""
    model = served_model(body.model, services.settings)
    task = embedding_task(body, model, services.settings, services.client.spec)
    return GenerationResponse(services, task)


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=EmbeddingList)
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        return answer(body, services)

    return routes

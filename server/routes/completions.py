"""`POST /v1/completions`."""

from fastapi import APIRouter, Response

from server.generation.admission import served_model
from server.generation.completions import completion_task
from server.generation.response import GenerationResponse
from server.http.streams import EventStream, described
from server.protocol.completions import Completion, CompletionRequest
from server.services import Services


def answer(body: CompletionRequest, services: Services) -> GenerationResponse:
    """Return the answer to a request. Raises `ApiError`."""
    model = served_model(body.model, services.settings)
    return GenerationResponse(services, completion_task(body, model, services.client.spec))


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=Completion, responses=described(EventStream))
    async def create_completion(body: CompletionRequest) -> Response:
        return answer(body, services)

    return routes

"""`POST /v1/chat/completions`."""

from fastapi import APIRouter, Response

from server.generation.admission import check_count, served_model
from server.generation.chat import chat_task
from server.generation.response import GenerationResponse
from server.http.streams import EventStream, described
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=described(EventStream))
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        settings = services.settings
        model = served_model(body.model, settings)
        check_count("messages", len(body.messages), settings.limits.max_messages)
        check_count("tools", len(body.tools or ()), settings.limits.max_tools)
        return GenerationResponse(services, chat_task(body, model, settings, services.client.spec))

    return routes

"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from fastapi import APIRouter, Request, Response

from server.generation.admission import check_count, served_model
from server.generation.messages_api import message_task, render_message
from server.generation.path import without_generation
from server.generation.response import GenerationResponse
from server.http.errors import invalid_value
from server.http.streams import PingedEventStream, described
from server.protocol.messages_api import (
    CountTokensRequest,
    MessageFields,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from server.services import Services
from server.text.renderer import RenderError

PATH = "/v1/messages"


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    settings = services.settings

    def checked_model(body: MessageFields) -> str:
        check_count("messages", len(body.messages), settings.limits.max_messages)
        check_count("tools", len(body.tools or ()), settings.limits.max_tools)
        return served_model(body.model, settings)

    @routes.post(PATH, response_model=MessageObject, responses=described(PingedEventStream))
    async def create_message(body: MessagesRequest) -> Response:
        return GenerationResponse(services, message_task(body, checked_model(body), settings))

    @routes.post(PATH + "/count_tokens")
    async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
        checked_model(body)
        try:
            turn = await without_generation(
                request, services, lambda: render_message(body, services.renderer, settings)
            )
        except RenderError as error:
            raise invalid_value(str(error), "messages") from error
        return {"input_tokens": len(turn.prompt)}

    return routes

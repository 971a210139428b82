"""`POST /v1/chat/completions` and `POST /v1/chat/completions/render`."""

from fastapi import APIRouter, Request, Response

from server.generation.admission import check_count, served_model
from server.generation.chat import chat_task
from server.generation.path import without_generation
from server.generation.response import GenerationResponse
from server.generation.task import Task
from server.http.errors import invalid_value
from server.http.streams import EventStream, described
from server.protocol.chat import ChatCompletion, ChatCompletionRequest
from server.protocol.tokens import RenderedPrompt
from server.services import Services
from server.text.renderer import RenderError


def answer(body: ChatCompletionRequest, services: Services) -> GenerationResponse:
    """Return the answer to a request. Raises `ApiError`."""
    return GenerationResponse(services, checked_task(body, services))


def checked_task(body: ChatCompletionRequest, services: Services) -> Task:
    """Return the task of a request within the server's limits. Raises `ApiError`."""
    settings = services.settings
    model = served_model(body.model, settings)
    check_count("messages", len(body.messages), settings.limits.max_messages)
    check_count("tools", len(body.tools or ()), settings.limits.max_tools)
    return chat_task(body, model, settings, services.client.spec)


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=described(EventStream))
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        return answer(body, services)

    @routes.post("/v1/chat/completions/render")
    async def render_chat_completion(request: Request, body: ChatCompletionRequest) -> RenderedPrompt:
        """Return the prompt that a chat becomes."""
        task = checked_task(body, services)
        try:
            rendered = await without_generation(request, services, lambda: task.render(services.renderer))
        except RenderError as error:
            raise invalid_value(str(error), task.prompt_param) from error
        (prompt,) = rendered.prompts
        return {"prompt": await services.renderer.decode(prompt), "prompt_token_ids": list(prompt)}

    return routes

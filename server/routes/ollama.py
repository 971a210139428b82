"""What Ollama's clients ask: `/api/chat`, `generate`, `embed`, `tags`, `ps`, `show` and `version`."""

from datetime import UTC, datetime

from fastapi import APIRouter, Response

from server.generation.admission import check_count, served_model
from server.generation.ollama import Request, embed_task, loaded, ollama_task
from server.generation.response import GenerationResponse
from server.generation.turn import ChatFormat
from server.http.json_response import json_response
from server.http.streams import LineStream, described
from server.options.settings import ServerSettings
from server.protocol.ollama import (
    EmbedRequest,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbeddings,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaModels,
    RunningModels,
    ShownModel,
    ShowRequest,
)
from server.services import Services
from server.version import server_version

_DETAILS: OllamaDetails = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
_NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded
_DEFAULT_TAG = ":latest"  # which Ollama's clients add to names without a tag


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    settings = services.settings

    def model_of(name: str | None) -> str:
        if name is not None and name not in settings.model_names:
            name = name.removesuffix(_DEFAULT_TAG)
        return served_model(name, settings)

    def respond(body: Request) -> Response:
        model = model_of(body.model)
        if body.is_empty:
            with services.client.reserve(0):  # fails while the model is not loaded
                return json_response(loaded(body, model))
        return GenerationResponse(services, ollama_task(body, model, settings))

    @routes.post("/api/chat", response_model=OllamaAnswer, responses=described(LineStream))
    async def chat(body: OllamaChatRequest) -> Response:
        check_count("messages", len(body.messages or ()), settings.limits.max_messages)
        check_count("tools", len(body.tools or ()), settings.limits.max_tools)
        body.tool_use.check()
        return respond(body)

    @routes.post("/api/generate", response_model=OllamaAnswer, responses=described(LineStream))
    async def generate(body: OllamaGenerateRequest) -> Response:
        return respond(body)

    @routes.post("/api/embed", response_model=OllamaEmbeddings)
    async def embed(body: EmbedRequest) -> Response:
        model = model_of(body.model)
        return GenerationResponse(services, embed_task(body, model, settings, services.client.spec))

    @routes.get("/api/tags")
    async def list_models() -> OllamaModels:
        return {"models": _models(settings)}

    @routes.get("/api/ps")
    async def list_running() -> RunningModels:
        length = services.client.spec.max_model_len
        return {
            "models": [
                {**model, "expires_at": _NEVER, "size_vram": 0, "context_length": length}
                for model in _models(settings)
            ]
        }

    @routes.post("/api/show")
    async def show_model(body: ShowRequest) -> ShownModel:
        model_of(body.model if body.model is not None else body.name)
        with services.client.reserve(0):
            template = services.renderer.info.chat_template or ""
        return _shown(template, services.client.spec.max_model_len, settings)

    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": server_version()}

    return routes


def _models(settings: ServerSettings) -> list[OllamaModel]:
    """Return the model under each of its names."""
    return [
        {
            "name": name,
            "model": name,
            "modified_at": _modified_at(settings),
            "size": 0,
            "digest": "",
            "details": _DETAILS,
        }
        for name in settings.model_names
        if name != "*"
    ]


def _shown(template: str, max_model_len: int, settings: ServerSettings) -> ShownModel:
    reasons = ChatFormat.of(template, settings).reasoning is not None
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "modified_at": _modified_at(settings),
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "snapserve",
            "snapserve.context_length": max_model_len,
        },
        "capabilities": ["completion", "tools", *(["thinking"] if reasons else [])],
    }


def _modified_at(settings: ServerSettings) -> str:
    return datetime.fromtimestamp(settings.created, UTC).isoformat()

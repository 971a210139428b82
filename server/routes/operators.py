"""What operators and clients of vLLM, SGLang, llama.cpp and SageMaker ask about a server, and their route."""

from typing import Any

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.routes import chat, completions, embeddings
from server.services import Services
from server.version import server_version


class Load(TypedDict):
    server_load: int


class Pool(TypedDict):
    name: str
    policy: str
    num_slots: int
    capacity: int


class ServerInfo(TypedDict):
    version: str
    model: str
    max_model_len: int
    features: list[str]
    pools: list[Pool]


class Props(TypedDict):
    """The members of llama.cpp's answer that clients read."""

    default_generation_settings: dict[str, int]
    total_slots: int
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    name = services.settings.model_names[0]

    @routes.get("/load")
    async def load() -> Load:
        """As vLLM's: the sequences that the engine has, running or waiting."""
        return {"server_load": services.client.num_unfinished}

    @routes.get("/server_info")
    async def server_info() -> ServerInfo:
        spec = services.client.spec
        return {
            "version": server_version(),
            "model": name,
            "max_model_len": spec.max_model_len,
            "features": sorted(feature.value for feature in spec.features),
            "pools": [
                {
                    "name": pool.name,
                    "policy": pool.policy.name.value,
                    "num_slots": pool.num_slots,
                    "capacity": pool.policy.capacity,
                }
                for pool in spec.pools
            ],
        }

    @routes.get("/props")
    async def props() -> Props:
        spec = services.client.spec
        info = services.renderer.info
        return {
            "default_generation_settings": {"n_ctx": spec.max_model_len},
            "total_slots": sum(pool.num_slots for pool in spec.pools),
            "model_alias": name,
            "chat_template": info.chat_template or "",
            "bos_token": info.bos_token or "",
            "eos_token": info.eos_token or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"snapserve {server_version()}",
        }

    @routes.post("/invocations", include_in_schema=False, response_model=None)
    async def invocations(body: dict[str, Any]) -> Response:
        """As SageMaker's containers: a chat, a completion or embeddings, by the body's fields."""
        try:
            if "messages" in body:
                return chat.answer(ChatCompletionRequest.model_validate(body), services)
            if "prompt" in body:
                return completions.answer(CompletionRequest.model_validate(body), services)
            return embeddings.answer(EmbeddingRequest.model_validate(body), services)
        except ValidationError as error:
            raise RequestValidationError(
                [{**each, "loc": ("body", *each["loc"])} for each in error.errors()], body=body
            ) from error

    return routes

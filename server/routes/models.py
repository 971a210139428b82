"""`GET /v1/models` and `GET /v1/models/{id}`."""

from datetime import UTC, datetime

from fastapi import APIRouter

from server.generation.admission import served_model
from server.generation.turn import template_warnings
from server.protocol.models import Model, ModelList
from server.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    settings = services.settings
    created_at = datetime.fromtimestamp(settings.created, UTC).isoformat()

    def model(name: str) -> Model:
        max_model_len = services.client.spec.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": "snapserve",
            "root": settings.model_names[0],
            "parent": None,
            "max_model_len": max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": created_at,
            "lifecycle": "active",
            "max_input_tokens": max_model_len,
            "max_tokens": max_model_len,
            "warnings": template_warnings(services.renderer.info.chat_template, settings),
        }

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        names = [name for name in settings.model_names if name != "*"]
        return {
            "object": "list",
            "data": [model(name) for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        served = served_model(name, settings)
        return model(name if name in settings.model_names else served)

    return routes

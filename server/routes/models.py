"""`GET /v1/models` and `GET /v1/models/{id}`."""

from fastapi import APIRouter

from server.generation.admission import served_model
from server.protocol.models import Model, ModelList
from server.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    settings = services.settings

    def model(name: str) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": "snapserve",
            "root": settings.model_names[0],
            "parent": None,
            "max_model_len": services.client.spec.max_model_len,
        }

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        return {"object": "list", "data": [model(name) for name in settings.model_names if name != "*"]}

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Model:
        served = served_model(name, settings)
        return model(name if name in settings.model_names else served)

    return routes

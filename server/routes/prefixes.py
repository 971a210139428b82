"""`POST /reset_prefix_cache`: forget what is stored of prompts."""

from fastapi import APIRouter, Response

from server.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        """As vLLM's: prompts that come after it find nothing of those before."""
        services.client.reset_prefixes()
        return Response()

    return routes

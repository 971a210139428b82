"""`GET /health`, `/ready`, `/version` and `/metrics`: for operators and their tools."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.engine.client import Health
from server.services import Services
from server.version import server_version


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", response_model=dict[str, str])
    async def health() -> Response:
        """Liveness: status 503 means that the process should be restarted."""
        current = services.client.health()
        return _status(current, is_well=current.is_alive)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", response_model=dict[str, str])
    async def ready() -> Response:
        """Readiness: status 503 means that the server should get no requests."""
        current = services.client.health()
        return _status(current, is_well=current.is_alive and current.is_ready)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": server_version()}

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type=services.metrics.content_type)

    return routes


def _status(health: Health, *, is_well: bool) -> Response:
    headers = {"Cache-Control": "no-store"} if is_well else {"Cache-Control": "no-store", "Retry-After": "5"}
    return JSONResponse({"status": health.status.value}, 200 if is_well else 503, headers)

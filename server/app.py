"""The HTTP application: routes, one way to tell errors, and the middleware around them. It holds nothing beyond what it is given."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from backends.clock import WallClock
from server.auth import KeyGuard, KeyRing
from server.client import EngineClient, QueueFullError, UnavailableError
from server.errors import ApiError
from server.failures import as_api_error
from server.grammars import Grammars
from server.limits import BodyGuard
from server.output import GenerationError
from server.rate_limits import RateLimits
from server.renderer import Renderer
from server.request_id import RequestId
from server.routes import chat, completions, embeddings, models, status, tokens
from server.services import Exposition, Services
from server.settings import RateLimit, ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


def create_app(client: EngineClient, renderer: Renderer, settings: ServerSettings, metrics: Exposition, grammars: Grammars) -> ASGIApp:
    """Return the ASGI application that serves this engine."""
    services = Services(client, renderer, grammars, settings, metrics)
    # Redirects would be built from the Host header; the documentation pages would load scripts from elsewhere.
    app = FastAPI(title="snapserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    for family in (chat, completions, embeddings, models, tokens, status):
        app.include_router(family.router(services))
    for kind in (ApiError, RequestValidationError, HTTPException, QueueFullError, UnavailableError, GenerationError, Exception):
        app.add_exception_handler(kind, _tell)
    guarded: ASGIApp = BodyGuard(app, settings.limits.max_body_bytes)
    if settings.rate_limit != RateLimit() or settings.key_rate_limits:
        guarded = RateLimits(guarded, settings.rate_limit, settings.key_rate_limits, WallClock().now)
    if settings.api_keys:
        open_paths = OPEN_PATHS | {"/metrics"} if settings.metrics_are_open else OPEN_PATHS
        guarded = KeyGuard(guarded, KeyRing(settings.api_keys), open_paths)
    return RequestId(guarded)


async def _tell(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()

"""The HTTP application: the routes, their error handler, and the middleware around them."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from backends.clock import WallClock
from server.batches.disk import DiskFullError
from server.engine.client import QueueFullError, UnavailableError
from server.generation.events import GenerationError
from server.generation.failures import as_api_error
from server.http.aliases import Aliases
from server.http.auth import KeyGuard, KeyRing, key_name
from server.http.body import BodyGuard
from server.http.error_shapes import error_response
from server.http.errors import ApiError
from server.http.hosts import HostGuard, allowed_hosts
from server.http.ignored import IgnoredParameters
from server.http.observers import AccessLog
from server.http.rate_limits import Accounts, RateLimits, RateObserver
from server.http.record import RequestId
from server.options.settings import RateLimit, ServerSettings, UnknownParameters
from server.routes import (
    absent,
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages_api,
    models,
    ollama,
    operators,
    page,
    prefixes,
    responses,
    slots,
    status,
    tokens,
)
from server.services import Services
from server.state.interface import SharedState, StateError

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


def create_app(services: Services) -> FastAPI:
    """Return the application with all routes. `guarded` adds authentication and limits."""
    # Redirects would repeat the client's Host header. FastAPI's own `/docs` would load foreign scripts.
    app = FastAPI(title="snapserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    routers = [
        family.router(services)
        for family in (
            chat,
            completions,
            responses,
            messages_api,
            embeddings,
            models,
            ollama,
            tokens,
            files,
            batches,
            slots,
            prefixes,
            operators,
            page,
            status,
            absent,
        )
    ]
    for router in routers:
        app.include_router(router)
    app.add_middleware(
        IgnoredParameters,
        observer=services.metrics,
        refuses_unknown=services.settings.api.unknown_parameters is UnknownParameters.REFUSE,
    )
    # The batches' route checks that a batch's endpoint is served.
    app.state.paths = frozenset(
        route.path for router in routers for route in router.routes if isinstance(route, APIRoute)
    )
    for kind in (
        ApiError,
        RequestValidationError,
        HTTPException,
        QueueFullError,
        UnavailableError,
        DiskFullError,
        StateError,
        GenerationError,
        Exception,
    ):
        app.add_exception_handler(kind, _error_response)
    return app


def accounts(settings: ServerSettings, state: SharedState) -> Accounts | None:
    """Return the keys' accounts; None where nothing is limited."""
    if settings.rate_limit == RateLimit() and not settings.key_rate_limits:
        return None
    named = {key_name(key): limit for key, limit in settings.key_rate_limits.items()}
    return Accounts(settings.rate_limit, named, state.buckets)


def for_batches(app: ASGIApp, limits: Accounts | None) -> ASGIApp:
    """Return `app` for lines of batches: they count against their keys' limits, and wait for them."""
    return app if limits is None else RateLimits(app, limits, observer=None)


def guarded(
    app: ASGIApp, settings: ServerSettings, observer: RateObserver, limits: Accounts | None
) -> ASGIApp:
    """Return `app` within the middleware for client requests: authentication, limits, access log and CORS."""
    # Each middleware wraps the previous one, so requests pass them from the last to the first. The key check
    # precedes the rate limits, which are per key, and the body, which is not read without a valid key. The
    # aliases precede all middleware that compares or logs paths.
    guarded: ASGIApp = BodyGuard(app, settings.api.max_body_size)
    if limits is not None:
        guarded = RateLimits(guarded, limits, observer)
    if settings.api_keys:
        open_paths = OPEN_PATHS | page.PATHS if settings.api.page else OPEN_PATHS
        if not settings.api.metrics_require_key:
            open_paths |= {"/metrics"}
        guarded = KeyGuard(guarded, KeyRing(settings.api_keys), open_paths)
    guarded = HostGuard(guarded, allowed_hosts(settings))
    guarded = Aliases(AccessLog(guarded, WallClock().now))
    if settings.api.allowed_origins:
        # Outside the keys: a browser's preflight request carries no key.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.api.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return RequestId(guarded)


async def _error_response(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error), request.scope)

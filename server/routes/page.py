"""`GET /`: a page with a chat and a live view, `GET /slots/events`, which feeds the view, and `GET /docs`.

The pages are static and need no key, because they show nothing by themselves. What they request does: they
send the key that their user types. Their policy lets a browser load and call this server only, and run no
script but the pages' own files. `/docs` renders the API's description with Swagger UI, whose files are those
of the package fastapi-offline.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from server.http.errors import ApiError
from server.metrics.live import LiveView
from server.services import Services

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES: Final = {
    "/": "index.html",
    "/docs": "docs.html",
    "/page/chat.js": "chat.js",
    "/page/docs.js": "docs.js",
    "/page/icon.svg": "icon.svg",
    "/page/live.js": "live.js",
    "/page/main.js": "main.js",
    "/page/markdown.js": "markdown.js",
    "/page/page.css": "page.css",
    "/page/server.js": "server.js",
}
_SWAGGER_FILES: Final = {
    "/page/swagger-ui-bundle.js": "swagger-ui-bundle.js",
    "/page/swagger-ui.css": "swagger-ui.css",
}
PATHS: Final = frozenset(_FILES) | frozenset(_SWAGGER_FILES)
HEADERS: Final = {
    # Swagger UI's icons are data.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    if services.settings.api.page:
        folder = files("server.routes") / "page_files"
        for path, name in _FILES.items():
            kind = _TYPES[name.rpartition(".")[2]]
            answer = _file((folder / name).read_bytes(), f"{kind}; charset=utf-8")
            routes.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
        for path, name in _SWAGGER_FILES.items():
            routes.add_api_route(path, _swagger_file(name), methods=["GET", "HEAD"], include_in_schema=False)

    live = LiveView(services.client, services.metrics.totals)

    @routes.get("/slots/events", response_class=StreamingResponse)
    async def slot_events() -> StreamingResponse:
        """The state of all slots, four times a second, as server-sent events without any text or id."""
        if not services.settings.api.page:
            raise ApiError(404, "page_disabled", "This route is disabled: the server runs with --no-page.")
        services.client.spec  # noqa: B018  # raises while the model is being loaded
        return StreamingResponse(live.events(), headers=_STREAM_HEADERS, media_type="text/event-stream")

    return routes


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return answer


def _swagger_file(name: str) -> Callable[[], Awaitable[Response]]:
    """Return a route of a file that is too large to hold in memory for a page that few people open."""

    async def answer() -> Response:
        return FileResponse(Path(str(files("fastapi_offline") / "static" / name)), headers=HEADERS)

    return answer

"""Aliases of routes, for clients of other servers. Applied before anything decides on a path."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

# Families of routes that are also served without their /v1.
_FAMILIES: Final = frozenset({"chat", "completions", "responses", "messages", "embeddings", "models"})
_ALIASES: Final = {
    "/ping": "/health",
    "/v1/health": "/health",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}


class Aliases:
    """Middleware that replaces an alias by the route's own path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # In place, not in a copy: the observers outside this middleware read the path from the same
            # scope.
            scope["path"] = canonical_path(scope["path"])
        await self._app(scope, receive, send)


def canonical_path(path: str) -> str:
    """Return the path of the route that serves `path`, which may end with a slash."""
    if len(path) > 1 and path.endswith("/"):
        path = path[:-1]
    family = path[1:].partition("/")[0]
    return f"/v1{path}" if family in _FAMILIES else _ALIASES.get(path, path)

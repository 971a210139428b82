"""Other names that clients of other servers know routes by, changed before anything decides on a path."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

_FAMILIES: Final = frozenset(
    {"chat", "completions", "responses", "embeddings", "models"}
)  # known without their /v1, too
_NAMES: Final = {
    "/ping": "/health",
    "/v1/health": "/health",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}


class Aliases:
    """Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = routed(
                scope["path"]
            )  # of this very scope: what measures around this looks there for the route
        await self._app(scope, receive, send)


def routed(path: str) -> str:
    """Return the path that a request is answered at."""
    family = path[1:].partition("/")[0]
    return f"/v1{path}" if family in _FAMILIES else _NAMES.get(path, path)

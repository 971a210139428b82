"""An application that answers a few of its paths."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ApiError


class OnlyPaths:
    """Middleware that answers 404 to other paths than `paths`."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._paths:
            message = f"This port serves {', '.join(sorted(self._paths))} alone."
            await ApiError(404, "unknown_url", message).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

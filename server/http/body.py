"""What a body may be, before anything parses it: JSON by its own account, of a bounded size. Uploads are read piece by piece instead."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import ApiError

UPLOADS: Final = frozenset({"/v1/files"})


class BodyGuard:
    """Middleware that reads a request's body whole, up to a limit, and answers 413 or 415 to what may not pass."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE"):
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] in UPLOADS:
                _check_site(Headers(scope=scope))
                await self._app(scope, receive, send)
                return
            _check_content_type(Headers(scope=scope))
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body, or None when its sender went away before its end."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, "request_too_large", f"The request's body is larger than {self._max_body_bytes} bytes."
        )


def _check_content_type(headers: Headers) -> None:
    given = headers.get("content-type", "")
    if not given and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return  # nothing is no JSON: there are routes that need no body
    media_type = given.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json:
        raise ApiError(
            415, "unsupported_content_type", f"Content-Type must be application/json, got {given[:100]!r}."
        )


def _check_site(headers: Headers) -> None:
    """Refuse a form from another site's page: browsers send those without asking, unlike JSON."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "cross_site_request", "Files are not taken from another site's pages.")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body` once and then whatever comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed

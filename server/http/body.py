"""Middleware that checks a body's Content-Type and bounds its size before anything parses it.

Uploads are exempt: their routes read them in pieces and bound them themselves.
"""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.error_shapes import error_response
from server.http.errors import ApiError

UPLOADS: Final = frozenset({"/v1/files"})


class BodyGuard:
    """Reads a request's whole body, up to a limit.

    Answers 413 to a longer one, and 415 to one that is not JSON.
    """

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
            await error_response(error, scope)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body, or None when the client disconnected before its end."""
        declared = headers.get("content-length", "")
        # Cut to 20 digits, because `int` raises ValueError beyond 4,300.
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
    content_type = headers.get("content-type", "")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not content_type and not has_body:
        return  # an empty body is allowed: some routes need none
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json:
        message = f"Content-Type must be application/json, got {content_type[:100]!r}."
        raise ApiError(415, "unsupported_content_type", message)


def _check_site(headers: Headers) -> None:
    """Refuse a form from another site's page.

    Browsers send forms to other sites without a preflight request, unlike JSON, so CORS does not stop them.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "cross_site_request", "Files cannot be uploaded from another site's pages.")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns `body` once, and then the messages that follow it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed

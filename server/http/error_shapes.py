"""Errors in the form of the API that a request belongs to, which its path shows."""

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from server.http.errors import ApiError
from server.http.json_response import json_response
from server.http.record import RequestRecord

_OVERLOADED: Final = 529  # Anthropic's status of a server that is full
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    _OVERLOADED: "overloaded_error",
}


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return an error as the clients of the request's API expect it."""
    path = scope.get("path", "")
    if path.startswith("/v1/messages"):
        body = anthropic_error(error) | {"request_id": RequestRecord.of(scope).request_id}
        return json_response(body, _anthropic_status(error), error.headers)
    if path.startswith("/api/"):
        return json_response(ollama_error(error), error.status, error.headers)
    return error.response()


def anthropic_error(error: ApiError) -> dict[str, object]:
    """Return the body, or the event of a stream. Claude Code shortens a conversation that is "too long"."""
    kind = _TYPES.get(_anthropic_status(error), "invalid_request_error")
    is_too_long = error.code == "context_length_exceeded"
    message = f"prompt is too long: {error.message}" if is_too_long else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: ApiError) -> Mapping[str, object]:
    return {"error": error.message}


def _anthropic_status(error: ApiError) -> int:
    """Return the status: a full server is overloaded; a limit of the key or of the request is its own."""
    is_full = error.kind == "rate_limit_error" and error.code != "queue_timeout"
    return _OVERLOADED if is_full else error.status

"""Errors as clients of the OpenAI API see them: a status, headers, and a body with a string code.

The module does not depend on the server's exceptions: `server.generation.failures` maps them to these errors.
"""

from collections.abc import Mapping
from typing import Final, TypedDict

from starlette.responses import Response

from server.http.json_response import json_response

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class ApiError(Exception):
    """An error that is sent to the client.

    `param` names the parameter at fault, `kind` is the body's `type`.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def invalid_value(message: str, param: str | None, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def unsupported_parameter(param: str, reason: str = "is not supported by this server") -> ApiError:
    return ApiError(400, "unsupported_parameter", f"Unsupported parameter: '{param}' {reason}.", param=param)


def model_not_found(name: str) -> ApiError:
    message = f"The model '{name}' does not exist or you do not have access to it."
    return ApiError(404, "model_not_found", message, param="model")


def conflict(code: str, message: str, param: str) -> ApiError:
    """The object's state does not allow the request. A retry would be refused again."""
    return ApiError(409, code, message, param=param, headers={"x-should-retry": "false"})


def invalid_api_key(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})


def overloaded(message: str, retry_after: int, code: str = "rate_limit_exceeded") -> ApiError:
    return ApiError(429, code, message, kind="rate_limit_error", headers={"Retry-After": str(retry_after)})


def unavailable(code: str, message: str, retry_after: int) -> ApiError:
    return ApiError(503, code, message, kind=SERVER_ERROR, headers={"Retry-After": str(retry_after)})


def disk_is_full() -> ApiError:
    message = "The server's disk is full: nothing can be stored until its operator has made room."
    return ApiError(507, "insufficient_storage", message, kind=SERVER_ERROR)


def timed_out(message: str) -> ApiError:
    """A request used up its time. A retry would use it up again."""
    return ApiError(408, "request_timeout", message, kind=SERVER_ERROR, headers={"x-should-retry": "false"})


def slow_reader(max_lag: float) -> ApiError:
    message = f"The stream was read too slowly: it lagged more than {max_lag:g} seconds behind its answer."
    return ApiError(408, "slow_reader", message)


def internal_error() -> ApiError:
    message = "The server had an error while processing your request."
    return ApiError(500, "internal_error", message, kind=SERVER_ERROR)

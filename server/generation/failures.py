"""Maps exceptions of the layers below to errors of the API.

An unexpected exception is an internal error, whose text is not sent to the client.
"""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from scheduler.messages import FinishReason
from server.batches.disk import DiskFullError
from server.engine.client import HealthStatus, QueueFullError, UnavailableError
from server.generation.events import GenerationError, SlowReaderError
from server.http.errors import (
    ApiError,
    disk_is_full,
    internal_error,
    invalid_value,
    overloaded,
    slow_reader,
    timed_out,
    unavailable,
)
from server.http.validation import invalid_request
from server.state.interface import StateError

RETRY_SOON = 1  # seconds: every request that ends frees a place in the queue
RETRY_LATER = 5  # seconds: loading, draining and restarting take longer


def as_api_error(error: Exception) -> ApiError:
    """Return the error of the API for `error`."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return invalid_request(error)
        case HTTPException():
            return _http_error(error)
        case QueueFullError():
            return _full(error)
        case UnavailableError():
            return _unavailable(error.health.status)
        case SlowReaderError():
            return slow_reader(error.max_lag)
        case GenerationError():
            return _generation_error(error)
        case DiskFullError():
            return disk_is_full()
        case StateError():
            message = "The server cannot use the shared state of stored responses. Please try later."
            return unavailable("state_unavailable", message, RETRY_LATER)
    return internal_error()


def _full(error: QueueFullError) -> ApiError:
    if error.num_sequences > error.limit:
        # A retry cannot help, so this is the client's error.
        return invalid_value(
            f"{error.num_sequences} sequences (prompts × n) are more than this server's "
            f"limit of {error.limit}.",
            "n",
        )
    return overloaded(f"The server is full: {error}. Please try again.", RETRY_SOON)


def _generation_error(error: GenerationError) -> ApiError:
    match error.final.reason:
        case FinishReason.REJECTED:
            return invalid_value(f"This server cannot serve the request: {error}.", None)
        case FinishReason.QUEUE_FULL:
            return overloaded("The server is full. Please try again.", RETRY_SOON)
        case FinishReason.QUEUE_TIMEOUT:
            return overloaded(
                "The request waited for a slot as long as it was allowed to.", RETRY_SOON, "queue_timeout"
            )
        case FinishReason.TIMEOUT:
            return timed_out("The request was not finished within the time it was allowed to take.")
        case FinishReason.ABORT:
            return unavailable(
                "server_shutting_down",
                "The request was ended because the server is shutting down.",
                RETRY_LATER,
            )
        case _:
            return internal_error()


def _unavailable(status: HealthStatus) -> ApiError:
    code, message = {
        HealthStatus.LOADING: ("model_loading", "The model is being loaded."),
        HealthStatus.DRAINING: ("server_shutting_down", "The server is shutting down."),
        HealthStatus.STALLED: ("engine_stalled", "The engine makes no progress."),
        HealthStatus.DEAD: ("engine_dead", "The engine has failed."),
    }.get(status, ("unavailable", "The server cannot serve this request now."))
    return unavailable(code, message, RETRY_LATER)


def _http_error(error: HTTPException) -> ApiError:
    """Return the error of the API for one that the framework raised."""
    code, message = {
        404: ("unknown_url", "There is nothing at this URL. Please check it for typos."),
        405: ("method_not_allowed", "This URL does not take this method."),
    }.get(error.status_code, ("invalid_request", str(error.detail)))
    return ApiError(error.status_code, code, message, headers=error.headers)

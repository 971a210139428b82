"""`/v1/batches`."""

from typing import (
    Annotated,
    ClassVar,
    Literal,
    NotRequired,  # pydantic takes typing's from Python 3.12 on
)

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.protocol.fields import RequestBody, Text
from server.protocol.files import ExpiresAfter

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata


def short(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > MAX_PAIRS:
        raise PydanticCustomError("invalid_value", "may have at most {limit} pairs", {"limit": MAX_PAIRS})
    if any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()):
        limits = {"key": MAX_KEY, "value": MAX_VALUE}
        raise PydanticCustomError(
            "invalid_value", "may have keys of at most {key} characters and values of at most {value}", limits
        )
    return metadata


class BatchRequest(RequestBody):
    is_whole: ClassVar[bool] = True

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Text, Text], AfterValidator(short)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrorObject(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorObject]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(TypedDict):
    """What has not happened is left out."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: NotRequired[str]
    errors: NotRequired[BatchErrors]
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: NotRequired[str]
    error_file_id: NotRequired[str]
    created_at: int
    in_progress_at: NotRequired[int]
    expires_at: int
    finalizing_at: NotRequired[int]
    completed_at: NotRequired[int]
    failed_at: NotRequired[int]
    expired_at: NotRequired[int]
    cancelling_at: NotRequired[int]
    cancelled_at: NotRequired[int]
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: NotRequired[str]
    last_id: NotRequired[str]
    has_more: bool

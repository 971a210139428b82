"""`/v1/files`."""

from typing import (
    Annotated,
    Final,
    Literal,  # pydantic takes typing's from Python 3.12 on
)

from pydantic import Field
from typing_extensions import TypedDict

from server.protocol.fields import RequestBody

MIN_LIFETIME: Final = 3600  # seconds
MAX_LIFETIME: Final = 30 * 24 * 3600


class ExpiresAfter(RequestBody):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME, le=MAX_LIFETIME)]


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(TypedDict):
    """Of an empty list, the first and last id are empty."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str
    last_id: str
    has_more: bool


class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


UPLOAD: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_LIFETIME,
                            "maximum": MAX_LIFETIME,
                        },
                    },
                }
            }
        },
    }
}

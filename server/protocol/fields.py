"""The base of all request bodies, and the types of fields that several bodies share.

Bodies are strict: a string is no number, an unknown field is an error, and no number is infinite. The errors
are pydantic's and the custom ones of this module. `server.http.validation` turns them into OpenAI's.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_INT32 = 2**31 - 1
MAX_LOGPROBS = 20  # alternatives a token

# Above every limit that a server can set. Validation of a hundred thousand items would delay all other
# requests.
MAX_FIELDS = 256  # of an object
MAX_ITEMS = 4096  # of a list or mapping, except of token ids


class RequestBody(BaseModel):
    """A JSON object that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_many_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise PydanticCustomError(
                "invalid_value", "has {count} fields, far more than there are", {"count": len(data)}
            )
        return data


def only(*neutral: object) -> Callable[[object], object]:
    """Return a validator of an unsupported field. It accepts null and the `neutral` values."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise PydanticCustomError("unsupported_parameter", "is not supported by this server")
        return value

    return check


def few(value: object) -> object:
    """Refuse more than `MAX_ITEMS` items before each is validated. Token ids have the body's limit only."""
    has_token_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    if isinstance(value, list | dict) and len(value) > MAX_ITEMS and not has_token_ids:
        raise PydanticCustomError(
            "invalid_value", "has {count} items, more than {limit}", {"count": len(value), "limit": MAX_ITEMS}
        )
    return value


def encodable(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "invalid_value", "has a lone surrogate at character {at}", {"at": error.start}
        ) from error
    return text


Text: TypeAlias = Annotated[str, AfterValidator(encodable)]
Unsupported: TypeAlias = Annotated[object, AfterValidator(only())]
Inert: TypeAlias = Annotated[Any, Field(description="Accepted; changes nothing.")]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT32)]


class TruncationFields(RequestBody):
    """vLLM's fields that truncate a prompt to a number of tokens, on its left by default."""

    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncated(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the truncated prompt."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        return token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:]

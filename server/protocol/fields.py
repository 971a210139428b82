"""The base of all request bodies, and the types of fields that several bodies share.

Bodies are strict: a string is no number, and no number is infinite. A field that is null is as one left out.
Unknown fields are ignored, unless `--unknown-parameters refuse`. The errors are pydantic's and the custom
ones of this module. `server.http.validation` turns them into OpenAI's.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.http.ignored import ignore, unknown_are_refused

MAX_INT32 = 2**31 - 1
MAX_LOGPROBS = 20  # alternatives a token
MAX_NAMED = 64  # tokens of `logprob_token_ids`

# Above every limit that a server can set. Validation of a hundred thousand items would delay all other
# requests.
MAX_FIELDS = 256  # of an object
MAX_ITEMS = 4096  # of a list or mapping, except of token ids


def _allow_additional(schema: dict[str, Any]) -> None:
    """Remove from the API's description that unknown fields are forbidden."""
    schema.pop("additionalProperties", None)


class RequestBody(BaseModel):
    """A JSON object that a client sends.

    Unknown fields are dropped before the object is validated. Those of a whole body (`is_whole`) are
    reported.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_allow_additional,
    )
    is_whole: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise PydanticCustomError(
                "invalid_value", "has {count} fields, far more than there are", {"count": len(data)}
            )
        fields = _fields(cls)
        refuses = unknown_are_refused()
        kept: dict[str, Any] = {}
        for name, value in data.items():
            known = fields.get(name)
            if known is None:
                if value is not None and cls.is_whole:
                    ignore(name)
                if value is not None and refuses:
                    kept[name] = value
            # null is a value of fields that must be there
            elif value is not None or known.is_required:
                kept[name] = value
        # The same field in the words of another server
        others = [name for name in kept if name in fields and not fields[name].better_names.isdisjoint(kept)]
        dropped = {name: kept.pop(name) for name in others}
        for name, value in dropped.items():
            if all(kept.get(better) != value for better in fields[name].better_names):
                ignore(name)
        return kept


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of a field: it counts unless the body has one of `better_names`."""

    is_required: bool
    better_names: frozenset[str] = frozenset()


@functools.cache
def _fields(kind: type[RequestBody]) -> dict[str, _Name]:
    """Return the names that a body's fields may have."""
    names = {}
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        choices = (
            [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [alias or name]
        )
        for index, choice in enumerate(choices):
            names[str(choice)] = _Name(field.is_required(), frozenset(map(str, choices[:index])))
    return names


def only(*neutral: object, instead: str = "") -> Callable[[object], object]:
    """Return a validator of an unsupported field. It accepts null and the `neutral` values.

    The error says what to do `instead`.
    """
    message = "is not supported by this server" + (f": {instead}" if instead else "")

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})
        return value

    return check


def unfollowed(*neutral: object) -> AfterValidator:
    """Return the validator of a hint that this server does not follow: it is accepted, and reported.

    Null and the `neutral` values ask for what the server does.
    """

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value not in neutral:
            ignore(str(info.field_name))
        return value

    return AfterValidator(check)


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
Hint: TypeAlias = Annotated[Any, unfollowed(), Field(description="Accepted; changes nothing.")]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT32)]


def whole(value: object) -> object:
    """Return a number without its fraction: clients of other servers send 2000.0 as a count of tokens."""
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


def clamped(count: int) -> int:
    return min(max(count, -1), MAX_INT32)


# A count in another server's words, whose limits are not ours. A negative one is -1: no limit.
ForeignCount: TypeAlias = Annotated[int, BeforeValidator(whole), AfterValidator(clamped)]


def not_zero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("invalid_value", "must be -1, or at least 1")
    return limit


class TruncationFields(RequestBody):
    """vLLM's fields that truncate a prompt to a number of tokens, on its left by default."""

    # -1: as many as there is room for
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT32), AfterValidator(not_zero)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncated(self, token_ids: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Return the truncated prompt. A sequence has room for `room` of its tokens."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit < 0:
            limit = max(room, 1)
        return token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:]

"""`/v1/embeddings`: the request, and the shape of its answer."""

from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypedDict

from server.http.errors import invalid_value
from server.protocol.completions import Prompt, each_prompt
from server.protocol.fields import MAX_INT32, Inert, Text, TruncationFields, only


class EmbeddingRequest(TruncationFields):
    is_whole: ClassVar[bool] = True

    model: Text | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    add_special_tokens: bool | None = None
    normalize: Annotated[object, AfterValidator(only(True))] = None
    user: Inert = None

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if not self.inputs or any(not item for item in self.inputs):
            raise invalid_value("'input' must not be empty.", "input")
        return self

    @cached_property
    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        return each_prompt(self.input)


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage

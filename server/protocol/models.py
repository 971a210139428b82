"""`/v1/models`."""

from typing import Literal

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on


class Model(TypedDict):
    """A model, with the members of OpenAI's, vLLM's and Anthropic's lists."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    warnings: list[str]  # about the chat template; ours


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None

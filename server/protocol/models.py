"""`/v1/models`."""

from typing import Literal

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]

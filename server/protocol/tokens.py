"""`/tokenize` and `/detokenize`: text to token ids and back."""

from typing import Annotated, ClassVar, TypeAlias

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from server.protocol.chat import ChatTurns
from server.protocol.fields import RequestBody, Text, TokenId
from server.protocol.tools import ToolFields


class TokenizeTextRequest(RequestBody):
    is_whole: ClassVar[bool] = True

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatTurns, ToolFields):
    is_whole: ClassVar[bool] = True

    model: Text | None = None
    return_token_strs: bool | None = None


def _kind(body: object) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "text"


TokenizeRequest: TypeAlias = Annotated[
    Annotated[TokenizeTextRequest, Tag("text")] | Annotated[TokenizeChatRequest, Tag("chat")],
    Discriminator(_kind),
]


class RenderedPrompt(TypedDict):
    prompt: str
    prompt_token_ids: list[int]


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestBody):
    is_whole: ClassVar[bool] = True

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]


class DetokenizeAnswer(TypedDict):
    prompt: str

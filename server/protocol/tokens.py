"""`/tokenize` and `/detokenize`: text to token ids and back."""

from typing import Annotated, TypedDict

from pydantic import FailFast, Field

from server.protocol.chat import ChatTurns
from server.protocol.fields import RequestBody, Text, TokenId


class TokenizeTextRequest(RequestBody):
    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatTurns):
    model: Text | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[TokenId], FailFast(), Field(max_length=2**20)]


class DetokenizeAnswer(TypedDict):
    prompt: str

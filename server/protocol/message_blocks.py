"""The messages of Anthropic's `/v1/messages`, and the blocks of which they consist.

Blocks and fields of other kinds are skipped and reported: clients send what only Anthropic's own server can
use. Images and documents without text are refused: the model would answer without what the question is about.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.http.ignored import ignore
from server.protocol.fields import RequestBody, Text, few

UNSIGNED: Final = "unsigned"
"""The signature of reasoning. Behind a colon it has the text of reasoning that is not shown, in base64."""


class Lenient(RequestBody):
    """An object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Lenient):
    type: Literal["text"]
    text: Text


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: Text = ""
    signature: Text | None = None

    @property
    def text(self) -> str:
        """The reasoning, also where it was not shown to the client."""
        kind, _, hidden = (self.signature or "").partition(":")
        if self.thinking or kind != UNSIGNED:
            return self.thinking
        try:
            return base64.b64decode(hidden, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ImageBlock(Lenient):
    type: Literal["image"]

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise PydanticCustomError("invalid_value", "is an image, but this model reads text only")


class ToolReferenceBlock(Lenient):
    """A tool with `defer_loading` that the client has found."""

    type: Literal["tool_reference"]
    tool_name: Text


class OtherBlock(Lenient):
    """A block of a kind that this server does not know, or that only Anthropic's server can use."""

    type: Text

    @model_validator(mode="after")
    def _report(self) -> Self:
        ignore(f"messages.{self.type}")
        return self


class SearchResultBlock(Lenient):
    type: Literal["search_result"]
    source: Text = ""
    title: Text = ""
    content: Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(few)]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class DocumentSource(Lenient):
    type: Text
    data: Text = ""
    content: "Text | list[TextBlock | ImageBlock]" = ""


class DocumentBlock(Lenient):
    type: Literal["document"]
    source: DocumentSource
    title: Text | None = None
    context: Text | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.source.type not in ("text", "content"):
            raise PydanticCustomError(
                "invalid_value",
                "is a document of source {kind}, but this model reads text only",
                {"kind": repr(self.source.type[:64])},
            )
        return self

    @property
    def text(self) -> str:
        content = self.source.content
        texts = (
            [content] if isinstance(content, str) else [b.text for b in content if isinstance(b, TextBlock)]
        )
        return "\n".join(filter(None, [self.title, self.context, self.source.data, *texts]))


def _kind(*known: str) -> Discriminator:
    """Return a discriminator of these types of blocks; another one is `other`."""

    def kind(block: object) -> str | None:
        name = block.get("type") if isinstance(block, Mapping) else getattr(block, "type", None)
        if not isinstance(name, str):
            return None
        return name if name in known else "other"

    return Discriminator(
        kind, custom_error_type="invalid_value", custom_error_message="must be a block with a 'type'"
    )


ResultBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")],
    _kind("text", "image", "document", "search_result", "tool_reference"),
]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None

    @property
    def references(self) -> list[str]:
        """The names of the tools that the result makes known."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block.tool_name for block in blocks if isinstance(block, ToolReferenceBlock)]

    @property
    def text(self) -> str:
        text = self.content if isinstance(self.content, str) else "\n".join(texts_of(self.content or ()))
        return f"Error: {text}" if self.is_error else text


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    _kind("text", "image", "document", "search_result", "thinking", "tool_use", "tool_result"),
]


def texts_of(blocks: Iterable[object]) -> Iterator[str]:
    """Yield what blocks say to the model, without those that say nothing."""
    for block in blocks:
        match block:
            case TextBlock(text=text) | DocumentBlock(text=text) | SearchResultBlock(text=text):
                yield text
            case ToolReferenceBlock(tool_name=name):
                yield f"The tool {name} can be called now."
            case _:
                pass


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return (TextBlock(type="text", text=self.content),)
        return self.content


def few_blocks(messages: object) -> object:
    """Refuse more blocks than `MAX_ITEMS`, over all messages and inside results of tools."""
    if isinstance(messages, list):
        blocks = _nested(messages)
        few([*blocks, *_nested(blocks)])
    return messages


def _nested(objects: Iterable[object]) -> list[object]:
    lists = [value.get("content") for value in objects if isinstance(value, dict)]
    return [block for blocks in lists if isinstance(blocks, list) for block in blocks]


def hidden(thinking: str) -> str:
    """Return the signature of reasoning that is not shown. The client returns it, and the model reads it."""
    return f"{UNSIGNED}:{base64.b64encode(thinking.encode()).decode()}"

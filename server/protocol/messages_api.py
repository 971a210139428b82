"""Anthropic's `/v1/messages`: the request, its conversation as chat templates take it, and answers.

Blocks, tools and fields of other kinds are skipped and reported: clients send what only Anthropic's own
server can use.
Images and documents without text are refused: the model would answer without what the question is about.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NotRequired, Self, TypeAlias

from pydantic import AliasPath, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.grammar.structure import Structure, StructureKind
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import MAX_INT32, RequestBody, Text, few
from server.protocol.generation import Effort, GenerationRequest, ThinkingLimit
from server.protocol.structured import Schema
from server.protocol.tools import FunctionDefinition, ToolChoice, ToolUse
from server.protocol.usage import CacheUsage, SpeculativePrefillUsage

Turn: TypeAlias = dict[str, Any]  # a message as chat templates take it

UNSIGNED: Final = "unsigned"
"""The signature of reasoning. Behind a colon it has the text of reasoning that is not shown, in base64."""

# Claude Code's first system block says who pays. It differs between sessions, which would share no prefix.
_BILLING: Final = "x-anthropic-billing-header:"


class _Lenient(RequestBody):
    """An object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Lenient):
    type: Literal["text"]
    text: Text


class ThinkingBlock(_Lenient):
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


class ToolUseBlock(_Lenient):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ImageBlock(_Lenient):
    type: Literal["image"]

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise PydanticCustomError("invalid_value", "is an image, but this model reads text only")


class ToolReferenceBlock(_Lenient):
    """A tool with `defer_loading` that the client has found."""

    type: Literal["tool_reference"]
    tool_name: Text


class OtherBlock(_Lenient):
    """A block of a kind that this server does not know, or that only Anthropic's server can use."""

    type: Text

    @model_validator(mode="after")
    def _report(self) -> Self:
        ignore(f"messages.{self.type}")
        return self


class SearchResultBlock(_Lenient):
    type: Literal["search_result"]
    source: Text = ""
    title: Text = ""
    content: Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(few)]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class DocumentSource(_Lenient):
    type: Text
    data: Text = ""
    content: "Text | list[TextBlock | ImageBlock]" = ""


class DocumentBlock(_Lenient):
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


class ToolResultBlock(_Lenient):
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
        text = self.content if isinstance(self.content, str) else "\n".join(_texts(self.content or ()))
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


def _texts(blocks: Iterable[object]) -> Iterator[str]:
    """Yield what blocks say to the model, without those that say nothing."""
    for block in blocks:
        match block:
            case TextBlock(text=text) | DocumentBlock(text=text) | SearchResultBlock(text=text):
                yield text
            case ToolReferenceBlock(tool_name=name):
                yield f"The tool {name} can be called now."
            case _:
                pass


class Message(_Lenient):
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


class CustomTool(FunctionDefinition, _Lenient):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    parameters: Annotated[dict[str, Any], Field(validation_alias="input_schema")]
    defer_loading: bool | None = None


class OtherTool(_Lenient):
    """A tool that Anthropic's server runs, or whose schema its models know."""

    type: Text

    @model_validator(mode="after")
    def _report(self) -> Self:
        ignore(f"tools.{self.type}")
        return self


def _tool_kind(tool: object) -> str:
    if not isinstance(tool, Mapping):
        return "other" if isinstance(tool, OtherTool) else "custom"
    return "custom" if tool.get("type") in (None, "custom") or "input_schema" in tool else "other"


Tool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_kind)
]


class Choice(_Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise invalid_value("'tool_choice' of type 'tool' needs a 'name'.", "tool_choice")
        return self

    def plain(self) -> ToolChoice:
        if self.type == "tool":
            return ToolChoice("required", (str(self.name),), is_named=True)
        return ToolChoice("required" if self.type == "any" else "none" if self.type == "none" else "auto")


class Thinking(_Lenient):
    """Whether to reason, where the model can choose, and with how many tokens at most."""

    type: Text
    display: Text | None = None
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None


class OutputFormat(_Lenient):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(_Lenient):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(_Lenient):
    user_id: Text | None = None


class MessageFields(GenerationRequest):
    """What a request for a message and a count of its tokens share."""

    model_config = ConfigDict(extra="ignore")

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(few_blocks), BeforeValidator(few)
    ]
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of `output_config.format`
    stop: Annotated[
        list[Text] | None, Field(fail_fast=True, validation_alias="stop_sequences"), BeforeValidator(few)
    ] = None
    metadata: Metadata | None = None
    user: Annotated[Text | None, Field(validation_alias=AliasPath("metadata", "user_id"))] = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        tools = self.tool_use
        if tools.choice.mode == "required" and not tools.functions:
            raise invalid_value(
                "'tool_choice' requires a call, but 'tools' has none that this server can offer.",
                "tool_choice",
            )
        tools.check()
        return self

    @property
    def tool_use(self) -> ToolUse:
        """The functions. Tools with `defer_loading` count once the conversation refers to them.

        They count at once where a search that this server does not run would find them.
        """
        given = self.tools or ()
        found = set(self._references())
        are_searched = any(isinstance(t, OtherTool) and t.type.startswith("tool_search") for t in given)
        functions = tuple(
            tool
            for tool in given
            if isinstance(tool, CustomTool) and (not tool.defer_loading or are_searched or tool.name in found)
        )
        choice = self.tool_choice
        if choice is None:
            return ToolUse(functions)
        return ToolUse(functions, choice.plain(), is_parallel=not choice.disable_parallel_tool_use)

    @property
    def wants_thinking(self) -> bool | None:
        """Whether the model is to reason; None leaves it to its chat template."""
        return None if self.thinking is None else self.thinking.type != "disabled"

    @property
    def thinking_budget(self) -> ThinkingLimit | None:
        if self.thinking is None or self.thinking.budget_tokens is None or not self.wants_thinking:
            return super().thinking_budget
        return ThinkingLimit(self.thinking.budget_tokens, "thinking.budget_tokens")

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def effort(self) -> Effort | None:
        return None if self.output_config is None else self.output_config.effort

    @cached_property
    def turns(self) -> list[Turn]:
        """The conversation."""
        conversation = _Conversation()
        system = self.system or ()
        for text in (system,) if isinstance(system, str) else (block.text for block in system):
            if not text.startswith(_BILLING):
                conversation.say("system", text)
        for message in self.messages:
            conversation.add(message)
        return conversation.turns

    def _formats(self) -> Iterator[Structure]:
        if self.output_config is not None and self.output_config.format is not None:
            yield Structure(StructureKind.JSON, self.output_config.format.schema_, "output_config.format")
        if self.output_format is not None:
            yield Structure(StructureKind.JSON, self.output_format.schema_, "output_format")

    def _references(self) -> Iterator[str]:
        for message in self.messages:
            for block in message.blocks:
                if isinstance(block, ToolResultBlock):
                    yield from block.references


class MessagesRequest(MessageFields):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)]


class CountTokensRequest(MessageFields):
    """The body of `/v1/messages/count_tokens`."""


class _Conversation:
    """Turns as chat templates take them: many take no two of one role in a row, and one system message."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._names: dict[str, str] = {}  # of called tools, by the call's id
        # Of the last turn, joined when it is complete: there may be thousands of blocks.
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def turns(self) -> list[Turn]:
        self._complete()
        return self._turns

    def say(self, role: str, text: str, separator: str = "\n") -> None:
        """Add text, to the last turn if it has the same role."""
        if not self._turns or self._turns[-1]["role"] != role:
            self._begin({"role": role, "content": ""})
        elif self._content:
            self._content.append(separator)
        if text:
            self._content.append(text)

    def _begin(self, turn: Turn) -> None:
        self._complete()
        self._turns.append(turn)

    def _complete(self) -> None:
        """Give the last turn its texts."""
        if self._content:
            self._turns[-1]["content"] = "".join(self._content)
        if self._reasoning:
            self._turns[-1]["reasoning_content"] = "".join(self._reasoning)
        self._content = []
        self._reasoning = []

    def add(self, message: Message) -> None:
        match message.role:
            case "user":
                self._add_user(message)
            case "assistant":
                self._add_assistant(message)
            case _:
                self._add_system(message)

    def _add_user(self, message: Message) -> None:
        for block in message.blocks:
            if isinstance(block, ToolResultBlock):
                turn = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
                name = self._names.get(block.tool_use_id)
                self._begin(turn if name is None else turn | {"name": name})
            for text in _texts([block]):
                self.say("user", text)

    def _add_assistant(self, message: Message) -> None:
        self.say("assistant", "", separator="")  # also an answer without text is a turn
        turn = self._turns[-1]
        for block in message.blocks:
            match block:
                case TextBlock(text=text):
                    self.say("assistant", text, separator="")
                case ThinkingBlock(text=text) if text:
                    self._reasoning.append(text)
                case ToolUseBlock():
                    self._names[block.id] = block.name
                    function = {"name": block.name, "arguments": block.input}
                    call = {"id": block.id, "type": "function", "function": function}
                    turn.setdefault("tool_calls", []).append(call)
                case _:
                    pass

    def _add_system(self, message: Message) -> None:
        """Add a system message. One inside the conversation joins what the user says at its position."""
        text = "\n".join(_texts(message.blocks))
        if not text:
            return
        if not self._turns or self._turns[-1]["role"] == "system":
            self.say("system", text)
        else:
            self.say("user", f"<system-reminder>\n{text}\n</system-reminder>")


def hidden(thinking: str) -> str:
    """Return the signature of reasoning that is not shown. The client returns it, and the model reads it."""
    return f"{UNSIGNED}:{base64.b64encode(thinking.encode()).decode()}"


class TextContent(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent
StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens of the prompt are those read (`input_tokens`) and those restored (`cache_read_input_tokens`)."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: NotRequired[Literal["standard"]]
    cache: NotRequired[CacheUsage]
    speculative_prefill: NotRequired[SpeculativePrefillUsage]


class MessageObject(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int

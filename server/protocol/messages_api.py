"""Anthropic's `/v1/messages`: the request, its conversation as chat templates take it, and answers.

Tools of other kinds are skipped and reported: clients send what only Anthropic's own server can use.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NotRequired, Self, TypeAlias

from pydantic import AliasPath, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import TypedDict

from server.grammar.structure import Structure, StructureKind
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import MAX_INT32, Text, few
from server.protocol.generation import Effort, GenerationRequest, ThinkingLimit
from server.protocol.message_blocks import (
    Lenient,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    few_blocks,
    texts_of,
)
from server.protocol.structured import Schema
from server.protocol.tools import FunctionDefinition, ToolChoice, ToolUse
from server.protocol.usage import CacheUsage, SpeculativePrefillUsage

Turn: TypeAlias = dict[str, Any]  # a message as chat templates take it

# Claude Code's first system block says who pays. It differs between sessions, which would share no prefix.
_BILLING: Final = "x-anthropic-billing-header:"


class CustomTool(FunctionDefinition, Lenient):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    parameters: Annotated[dict[str, Any], Field(validation_alias="input_schema")]
    defer_loading: bool | None = None


class OtherTool(Lenient):
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


class Choice(Lenient):
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


class Thinking(Lenient):
    """Whether to reason, where the model can choose, and with how many tokens at most."""

    type: Text
    display: Text | None = None
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Lenient):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(Lenient):
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
            for text in texts_of([block]):
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
        text = "\n".join(texts_of(message.blocks))
        if not text:
            return
        if not self._turns or self._turns[-1]["role"] == "system":
            self.say("system", text)
        else:
            self.say("user", f"<system-reminder>\n{text}\n</system-reminder>")


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

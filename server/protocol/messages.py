"""The turns of a conversation, as a client sends them."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from server.http.errors import invalid_value
from server.protocol.fields import Inert, RequestBody, Text, Unsupported, few, only


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Annotated[Inert, Field(exclude=True)] = None


Content: TypeAlias = Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]


class CalledFunction(RequestBody):
    name: Text
    arguments: Text  # JSON, as the model wrote it
    parsed_arguments: Inert = None  # of the SDK's own parsing

    def plain(self) -> Mapping[str, object]:
        """Return the call as chat templates want it: with arguments that are an object."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(RequestBody):
    id: Text
    type: Literal["function"]
    function: CalledFunction
    index: Inert = None


class Turn(RequestBody):
    """A message. Unsupported fields are accepted as null, since responses of OpenAI's API have them."""

    name: Text | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[object, AfterValidator(only([]))] = None
    function_call: Unsupported = None

    def plain(self) -> Mapping[str, Any]:
        """Return the message with the fields that it has, as chat templates want it."""
        return self.model_dump(exclude_none=True, include={"role", "content", "name", "tool_call_id"})


class SaidMessage(Turn):
    role: Literal["system", "developer", "user"]
    content: Content
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None


class AssistantMessage(Turn):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), BeforeValidator(few)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    parsed: Inert = None  # of the SDK's own parsing
    tool_call_id: Unsupported = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise invalid_value(
                "A message of role 'assistant' must have 'content' or 'tool_calls'.", "messages"
            )
        return self

    def plain(self) -> Mapping[str, Any]:
        plain = {"content": "", **super().plain()}
        reasoning = self.reasoning if self.reasoning is not None else self.reasoning_content
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.plain()}
                for call in self.tool_calls
            ]
        return plain


class ToolMessage(Turn):
    role: Literal["tool"]
    content: Content
    tool_call_id: Text
    tool_calls: Unsupported = None


Message: TypeAlias = Annotated[SaidMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def few_parts(messages: object) -> object:
    """Refuse more text parts, or more calls, than `MAX_ITEMS`, over all messages."""
    if isinstance(messages, list):
        for name in ("content", "tool_calls"):
            lists = [message.get(name) for message in messages if isinstance(message, dict)]
            few([part for items in lists if isinstance(items, list) for part in items])
    return messages


Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(few_parts), BeforeValidator(few)
]

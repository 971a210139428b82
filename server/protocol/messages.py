"""The turns of a conversation, as a client sends them."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_serializer
from pydantic_core import PydanticCustomError

from server.protocol.fields import Inert, RequestBody, Text, Unsupported, few


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Annotated[Inert, Field(exclude=True)] = None


class RefusalPart(RequestBody):
    """A refusal of an earlier answer, which the prompt has as text."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal

    @model_serializer
    def _as_text(self) -> dict[str, str]:
        return {"type": "text", "text": self.refusal}


def _part_type(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None)


def only_text(part: object) -> object:
    """Refuse images, audio and files by name."""
    kind = _part_type(part)
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError(
            "invalid_value",
            "is a part of type {kind}, but this model reads text only",
            {"kind": repr(kind[:64])},
        )
    return part


Part: TypeAlias = Annotated[
    Annotated[TextPart | RefusalPart, Field(discriminator="type")], BeforeValidator(only_text)
]
Content: TypeAlias = Text | Annotated[list[Part], Field(fail_fast=True)]


def _json(arguments: object) -> object:
    """Return arguments that a client sends as an object in their usual form, as JSON."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


class CalledFunction(RequestBody):
    name: Text
    arguments: Annotated[Text, BeforeValidator(_json)] = "{}"  # JSON, as the model wrote it
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
    type: Literal["function"] = "function"
    function: CalledFunction


class Turn(RequestBody):
    """A message."""

    name: Text | None = None
    function_call: Unsupported = None  # the older form of `tool_calls`

    def plain(self) -> Mapping[str, Any]:
        """Return the message with the fields that it has, as chat templates want it."""
        plain = self.model_dump(exclude_none=True, include={"role", "content", "name", "tool_call_id"})
        return {"content": "", **plain}


class SaidMessage(Turn):
    role: Literal["system", "developer", "user"]
    content: Content | None


class AssistantMessage(Turn):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), BeforeValidator(few)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    audio: Inert = None  # its text, if it has one, is the content
    annotations: Inert = None
    parsed: Inert = None  # of the SDK's own parsing

    def plain(self) -> Mapping[str, Any]:
        plain = dict(super().plain())
        if not plain["content"] and self.refusal is not None:
            plain["content"] = self.refusal
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
    content: Content | None
    tool_call_id: Text


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

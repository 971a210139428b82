"""The items of `/v1/responses`, as clients send them and as the server returns them."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag
from typing_extensions import TypedDict

from server.protocol.chat import ChatTokenLogprob
from server.protocol.fields import Inert, RequestBody, Text, few
from server.protocol.messages import CalledFunction, RefusalPart, few_parts, only_text

Turn: TypeAlias = dict[str, Any]  # a message as chat templates want it
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(RequestBody):
    type: Literal["input_text"]
    text: Text
    prompt_cache_breakpoint: Inert = None


class OutputTextPart(RequestBody):
    """Text of an earlier answer, with what it came with."""

    type: Literal["output_text"]
    text: Text
    annotations: Inert = None
    logprobs: Inert = None
    parsed: Inert = None  # of the SDK's own parsing


class PlainTextPart(RequestBody):
    """The part of a chat message, which some clients send here too."""

    type: Literal["text"]
    text: Text


TextPart: TypeAlias = Annotated[
    Annotated[InputTextPart | OutputTextPart | PlainTextPart | RefusalPart, Field(discriminator="type")],
    BeforeValidator(only_text),
]


class OmittedPart(RequestBody):
    """A part of a tool's result that is no text. The prompt says that it was there."""

    type: Text

    @property
    def text(self) -> str:
        return f"({self.type.removeprefix('input_')} that this model cannot read)"


def _result_type(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None)
    return "text" if kind in ("input_text", "output_text", "text", "refusal") else "other"


ResultPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OmittedPart, Tag("other")], Discriminator(_result_type)
]


class GivenItem(RequestBody):
    id: Text | None = None
    status: Text | None = None


class MessageItem(GivenItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    phase: Inert = None

    def resource(self, new_id: str) -> Mapping[str, object]:
        """Return the item as it is given back."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        is_answer = self.role == "assistant"
        parts = [
            output_text(text, []) if is_answer else {"type": "input_text", "text": text} for text in texts
        ]
        return {
            "id": self.id or f"msg_{new_id}",
            "type": "message",
            "role": self.role,
            "status": "completed",
            "content": parts,
        }

    def join(self, turns: list[Turn]) -> None:
        """Add the item to the messages that a chat template is given."""
        content = (
            self.content
            if isinstance(self.content, str)
            else [{"type": "text", "text": part.text} for part in self.content]
        )
        is_rest = bool(turns) and turns[-1]["role"] == self.role == "assistant" and turns[-1]["content"] == ""
        if is_rest and "tool_calls" not in turns[-1]:
            turns[-1]["content"] = content
        else:
            turns.append({"role": self.role, "content": content})


class FunctionCallItem(GivenItem):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    parsed_arguments: Inert = None  # of the SDK's own parsing
    async_: Annotated[Inert, Field(alias="async")] = None
    namespace: Inert = None
    caller: Inert = None

    def resource(self, new_id: str) -> Mapping[str, object]:
        return {
            "id": self.id or f"fc_{new_id}",
            "type": self.type,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": "completed",
        }

    def join(self, turns: list[Turn]) -> None:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        function = CalledFunction(name=self.name, arguments=self.arguments).plain()
        turns[-1].setdefault("tool_calls", []).append(
            {"id": self.call_id, "type": "function", "function": function}
        )


class FunctionCallOutputItem(GivenItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Text | Annotated[list[ResultPart], Field(fail_fast=True), BeforeValidator(few)]
    name: Inert = None
    namespace: Inert = None
    caller: Inert = None

    def resource(self, new_id: str) -> Mapping[str, object]:
        output = (
            self.output
            if isinstance(self.output, str)
            else [{"type": "input_text", "text": part.text} for part in self.output]
        )
        return {
            "id": self.id or f"fco_{new_id}",
            "type": "function_call_output",
            "call_id": self.call_id,
            "output": output,
            "status": "completed",
        }

    def join(self, turns: list[Turn]) -> None:
        content = (
            self.output
            if isinstance(self.output, str)
            else [{"type": "text", "text": part.text} for part in self.output]
        )
        turns.append({"role": "tool", "tool_call_id": self.call_id, "content": content})


class CustomCallItem(GivenItem):
    """A call whose argument is free text. The prompt has it as a call with one argument."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text

    def resource(self, new_id: str) -> Mapping[str, object]:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        call = FunctionCallItem(
            type="function_call", id=self.id, call_id=self.call_id, name=self.name, arguments=arguments
        )
        return call.resource(new_id)


class SkippedItem(RequestBody):
    """An item that this server can do nothing with, such as a call of a hosted tool."""

    type: Text


class SummaryPart(RequestBody):
    type: Literal["summary_text"]
    text: Text


class ReasoningPart(RequestBody):
    type: Literal["reasoning_text"]
    text: Text


class GivenReasoningItem(GivenItem):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Field(fail_fast=True), BeforeValidator(few)] = Field(
        default_factory=list
    )
    content: Annotated[list[ReasoningPart], Field(fail_fast=True), BeforeValidator(few)] | None = None
    encrypted_content: Inert = None  # of another server: it can be read by that one alone

    def resource(self, new_id: str) -> Mapping[str, object]:
        content = [part.model_dump() for part in self.content or ()]
        summary = [part.model_dump() for part in self.summary]
        return {
            "id": self.id or f"rs_{new_id}",
            "type": self.type,
            "summary": summary,
            "content": content,
            "status": "completed",
        }

    def join(self, turns: list[Turn]) -> None:
        text = "\n".join(part.text for part in self.content or self.summary)
        turns.append({"role": "assistant", "content": "", "reasoning_content": text})


class ItemReference(RequestBody):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Text


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | GivenReasoningItem


_KINDS: Final = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "reasoning",
        "item_reference",
    }
)


def _kind(item: object) -> object:
    if not isinstance(item, Mapping):
        return getattr(item, "type", None)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return "other" if isinstance(kind, str) and kind not in _KINDS else kind


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[GivenReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[SkippedItem, Tag("other")],
    Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message="must be an item with a type",
    ),
]
InputItems: TypeAlias = Annotated[
    list[InputItem], Field(fail_fast=True, min_length=1), BeforeValidator(few_parts), BeforeValidator(few)
]


def turns_of(items: Sequence[Item]) -> list[Turn]:
    """Return the messages that a chat template is given. An answer's reasoning, text and calls are one."""
    turns: list[Turn] = []
    for item in items:
        item.join(turns)
    return turns


def without_oldest(turns: Sequence[Mapping[str, Any]], share: float) -> list[Mapping[str, Any]]:
    """Return a conversation without its oldest turns, which have at least this share of its text.

    System messages and what follows the last user message are kept. A call is dropped with its results.
    """
    num_chars = [len(json.dumps(turn, ensure_ascii=False)) for turn in turns]
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    is_system = [turn["role"] in ("system", "developer") for turn in turns]
    left = share * sum(num_chars)
    kept: list[int] = []
    for index, turn in enumerate(turns):
        is_result = turn["role"] == "tool" and not (kept and kept[-1] == index - 1)
        if is_system[index] or index >= last or (left <= 0 and not is_result):
            kept.append(index)
        else:
            left -= num_chars[index]
    return [turns[index] for index in kept]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputReasoning(TypedDict):
    """The reasoning itself, of which no summary is made."""

    id: str
    type: Literal["reasoning"]
    summary: list[object]
    content: list[ReasoningText]
    status: NotRequired[Status]


OutputItem: TypeAlias = OutputMessage | OutputFunctionCall | OutputReasoning


def output_text(text: str, logprobs: list[ChatTokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

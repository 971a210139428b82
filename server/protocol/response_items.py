"""The items of `/v1/responses`, as clients send them and as the server returns them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from typing_extensions import TypedDict

from server.protocol.chat import ChatTokenLogprob
from server.protocol.fields import Inert, RequestBody, Text, Unsupported, few, only
from server.protocol.messages import CalledFunction, few_parts

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


TextPart: TypeAlias = Annotated[InputTextPart | OutputTextPart, Field(discriminator="type")]


class GivenItem(RequestBody):
    id: Text | None = None
    status: Status | None = None


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
    async_: Annotated[object, Field(alias="async"), AfterValidator(only(False))] = None
    namespace: Unsupported = None
    caller: Unsupported = None

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
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Annotated[list[InputTextPart], Field(fail_fast=True, min_length=1), BeforeValidator(few)]
    name: Unsupported = None
    namespace: Unsupported = None
    caller: Unsupported = None

    def resource(self, new_id: str) -> Mapping[str, object]:
        output = (
            self.output
            if isinstance(self.output, str)
            else [{"type": "input_text", "text": part.text} for part in self.output]
        )
        return {
            "id": self.id or f"fco_{new_id}",
            "type": self.type,
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


class SummaryPart(RequestBody):
    type: Literal["summary_text"]
    text: Text


class ReasoningPart(RequestBody):
    type: Literal["reasoning_text"]
    text: Text


class GivenReasoningItem(GivenItem):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Field(fail_fast=True), BeforeValidator(few)]
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


def _kind(item: object) -> object:
    if not isinstance(item, Mapping):
        return getattr(item, "type", None)
    return item.get("type") or ("message" if "role" in item else "item_reference")


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[GivenReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message=(
            "must be an item of type message, function_call, function_call_output, reasoning or "
            "item_reference"
        ),
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

"""`/v1/chat/completions`: the request, and the shapes of its answers."""

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from server.errors import invalid_value
from server.protocol.fields import MAX_INT32, MAX_LOGPROBS, Inert, RequestBody, Text, Unsupported, few, only
from server.protocol.generation import GenerationRequest
from server.protocol.usage import Usage


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text


class Message(RequestBody):
    """One turn. The fields that are null here are those that an answer of the API carries, so that it can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]
    name: Text | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[object, AfterValidator(only([]))] = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None

    def plain(self) -> Mapping[str, object]:
        """Return the message with the fields that it has."""
        return self.model_dump(exclude_none=True, include={"role", "content", "name"})


def few_parts(messages: object) -> object:
    """Refuse more text parts than `MAX_ITEMS`, over all messages."""
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        few([part for content in contents if isinstance(content, list) for part in content])
    return messages


class ChatTurns(RequestBody):
    """Messages, and how they become a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(few_parts), BeforeValidator(few)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[object, AfterValidator(only({}))] = None
    chat_template: Unsupported = None
    documents: Unsupported = None

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise invalid_value("'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message")
        if self.messages[-1].role != "assistant":
            raise invalid_value("'continue_final_message' needs a final message of role 'assistant'.", "continue_final_message")
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatCompletionRequest(GenerationRequest, ChatTurns):
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    prediction: Inert = None  # a hint for speed alone

    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Annotated[object, AfterValidator(only(["text"]))] = None
    audio: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    echo: Annotated[object, AfterValidator(only(False))] = None

    @model_validator(mode="after")
    def _check_chat_options(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_value("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid_value(
                f"'max_tokens' is {self.max_tokens} and 'max_completion_tokens' is {self.max_completion_tokens}: give one of them.",
                "max_tokens",
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]

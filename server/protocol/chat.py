"""`/v1/chat/completions`: the request, and the shapes of its answers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import (
    MAX_INT32,
    MAX_ITEMS,
    MAX_LOGPROBS,
    ForeignCount,
    RequestBody,
    Text,
    Unsupported,
    few,
    only,
)
from server.protocol.generation import ChoicesRequest, Effort, ThinkingLimit, Verbosity, also
from server.protocol.kept_tokens import KeptTokensField
from server.protocol.messages import Messages, TextPart
from server.protocol.prompt_logprobs import PromptLogprobs
from server.protocol.tools import ToolFields
from server.protocol.usage import Usage
from server.text.tokenizer import RESERVED_VARIABLES


def not_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that are not a chat template's, but belong to the code that renders it."""
    reserved = sorted(variables.keys() & RESERVED_VARIABLES)
    if reserved:
        raise PydanticCustomError("invalid_value", "cannot set {names}", {"names": ", ".join(reserved)})
    return variables


class ChatTurns(RequestBody):
    """Messages, and how they become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[Text, Any], BeforeValidator(few), AfterValidator(not_reserved)] | None
    ) = None
    chat_template: Unsupported = None
    documents: Unsupported = None
    add_special_tokens: bool | None = None  # more than the template writes

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise invalid_value(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                "continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise invalid_value(
                "'continue_final_message' needs a final message of role 'assistant'.",
                "continue_final_message",
            )
        return self

    @property
    def template_options(self) -> dict[str, object]:
        return {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}

    @property
    def adds_generation_prompt(self) -> bool:
        return (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )


def without_degrees(effort: object) -> object:
    """Drop SGLang's effort as a number below 1: it is a hint that no template here takes."""
    if isinstance(effort, float) and 0 <= effort < 1:
        ignore("reasoning_effort")
        return None
    return effort


class ReasoningChoice(RequestBody):
    """OpenRouter's object, for `reasoning_effort` and `include_reasoning`."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: ForeignCount | None = None


def as_thinking(value: object) -> object:
    """Return a switch as an object. What is neither is ignored and reported."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    if isinstance(value, dict | None):
        return value
    ignore("thinking")
    return None


class ThinkingChoice(RequestBody):
    """SGLang's and DeepSeek's object, for `reasoning.enabled` and `reasoning.max_tokens`."""

    type: object = None
    budget_tokens: ForeignCount | None = None

    @property
    def is_enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(str(self.type))


class Prediction(RequestBody):
    """A guess of the answer, most of which the client knows already."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_ITEMS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(ChoicesRequest, ChatTurns, ToolFields):
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_INT32)] | None,
        also("max_tokens", "max_new_tokens"),
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    prediction: Prediction | None = None  # for speed alone

    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Annotated[object, AfterValidator(only(["text"]))] = None
    audio: Unsupported = None
    reasoning_effort: Annotated[Effort | None, BeforeValidator(without_degrees)] = None
    include_reasoning: bool | None = None  # whether an answer has its reasoning too
    reasoning: ReasoningChoice | None = None
    thinking: Annotated[ThinkingChoice | None, BeforeValidator(as_thinking)] = None
    # Of other servers, for the opposites of what this one does.
    separate_reasoning: Annotated[object, AfterValidator(only(True))] = None
    stream_reasoning: Annotated[object, AfterValidator(only(True))] = None
    verbosity: Verbosity | None = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    echo: bool | None = None  # of the message that is continued

    @model_validator(mode="after")
    def _check_chat_options(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        if self.echo and not self.continue_final_message:
            if self.messages[-1].role == "assistant":
                raise invalid_value("'echo' is only allowed when 'continue_final_message' is true.", "echo")
            ignore("echo")  # nothing is continued
        if self.n_probs and self.num_logprobs != self.n_probs:
            ignore("n_probs")
        self._report_switches()
        return self

    def _report_switches(self) -> None:
        """Report what asks for other reasoning than what decides."""
        effort, reasoning, thinking = self.effort, self.reasoning, self.thinking
        if reasoning is not None and effort is not None:
            if reasoning.enabled is not None and reasoning.enabled != (effort != "none"):
                ignore("reasoning.enabled")
            if reasoning.effort not in (None, effort):
                ignore("reasoning.effort")
        if thinking is not None:
            wanted = self.wants_thinking if effort is None else effort != "none"
            is_followed = thinking.is_enabled is not None and thinking.is_enabled == wanted
            if not is_followed and thinking.budget_tokens is None:
                ignore("thinking")
            elif not is_followed and thinking.type is not None:
                ignore("thinking.type")  # the budget is another parameter, which counts

    @property
    def effort(self) -> Effort | None:
        if self.reasoning_effort is not None or self.reasoning is None:
            return self.reasoning_effort
        return "none" if self.reasoning.enabled is False else self.reasoning.effort

    @property
    def effort_param(self) -> str:
        """The parameter that says `effort`."""
        if self.reasoning_effort is not None or self.reasoning is None:
            return "reasoning_effort"
        return "reasoning.enabled" if self.reasoning.enabled is False else "reasoning.effort"

    @property
    def wants_thinking(self) -> bool | None:
        """Whether the model is to reason, by what other servers call so; `effort` decides before it."""
        if self.thinking_param == "thinking":
            return None if self.thinking is None else self.thinking.is_enabled
        return True

    @property
    def thinking_param(self) -> str:
        """The parameter that says `wants_thinking`."""
        if self.reasoning is not None and self.reasoning.enabled:
            return "reasoning.enabled"
        if self.reasoning is not None and (self.reasoning.max_tokens or 0) > 0:
            return "reasoning.max_tokens"  # OpenRouter: enables reasoning
        return "thinking"

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def echoed(self) -> str:
        """What the answer's content is to begin with."""
        content = self.messages[-1].content if self.echo and self.continue_final_message else None
        return content if isinstance(content, str) else "".join(part.text for part in content or ())

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer: the newer of the two fields decides."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else super().token_limit

    @property
    def num_logprobs(self) -> int | None:
        own = (self.top_logprobs or 0) if self.logprobs else None
        is_decided = self.logprobs is False or self.top_logprobs is not None
        return own if is_decided else self.n_probs or own

    def _thinking_limits(self) -> Iterator[ThinkingLimit]:
        yield from super()._thinking_limits()
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            yield ThinkingLimit(self.reasoning.max_tokens, "reasoning.max_tokens")
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            yield ThinkingLimit(self.thinking.budget_tokens, "thinking.budget_tokens")


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class MessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]  # the older name of the same
    tool_calls: NotRequired[list[MessageToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kept_tokens: NotRequired[KeptTokensField | None]


class FunctionDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """The first delta of a call has all fields, with empty arguments. Others have an index and arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]
    refusal: None


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]

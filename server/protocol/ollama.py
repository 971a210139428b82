"""Ollama's `/api/chat` and `/api/generate`: the requests, and the shapes of their answers.

Options that belong to Ollama's own runner are ignored and reported: this server's slots were made at its
start. Samplers that this server lacks are refused unless they are off.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired, Self, TypeAlias

from pydantic import AfterValidator, AliasPath, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from server.grammar.structure import Structure, StructureKind
from server.http.errors import unsupported_parameter
from server.http.ignored import ignore
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import MAX_INT32, Inert, RequestBody, Text, Unsupported, few, only
from server.protocol.generation import Effort, GenerationRequest
from server.protocol.structured import ANY_OBJECT, Schema
from server.protocol.tools import Tool, ToolUse

Turn: TypeAlias = dict[str, Any]  # a message as chat templates take it
NoImages: TypeAlias = Annotated[object, AfterValidator(only([]))]


_OFF: Final = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}  # samplers, and the value that turns each off


def option(name: str) -> Any:
    """Return a field that clients send inside of `options`."""
    return Field(validation_alias=AliasPath("options", name))


class _Lenient(RequestBody):
    """An object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class OllamaRequest(GenerationRequest):
    """What both routes take."""

    model_config = ConfigDict(extra="ignore")

    stream: bool | None = True
    format: Literal["", "json"] | Schema | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    options: dict[str, Any] | None = None
    logprobs: Annotated[object, AfterValidator(only(False))] = None
    top_logprobs: Annotated[object, AfterValidator(only(0))] = None

    # -1 and -2 are no limit
    num_predict: Annotated[Annotated[int, Field(ge=-2, le=MAX_INT32)] | None, option("num_predict")] = None
    temperature: Annotated[Annotated[float, Field(ge=0, le=2)] | None, option("temperature")] = None
    top_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, option("top_p")] = None
    top_k: Annotated[Annotated[int, Field(ge=-1, le=MAX_INT32)] | None, option("top_k")] = None
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, option("min_p")] = None
    seed: Annotated[Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None, option("seed")] = None
    presence_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)] | None, option("presence_penalty")] = (
        None
    )
    frequency_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)] | None, option("frequency_penalty")] = (
        None
    )
    repetition_penalty: Annotated[Annotated[float, Field(gt=0, le=100)] | None, option("repeat_penalty")] = (
        None
    )
    stop: Annotated[
        Text | Annotated[list[Text], Field(fail_fast=True)] | None, BeforeValidator(few), option("stop")
    ] = None

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        known = {
            field.validation_alias.path[1]
            for field in type(self).model_fields.values()
            if isinstance(field.validation_alias, AliasPath)
        }
        for name, value in (self.options or {}).items():
            if name in _OFF and value not in (None, _OFF[name]):
                raise unsupported_parameter(f"options.{name}")
            if name not in known:
                ignore(f"options.{name}")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.num_predict if self.num_predict is not None and self.num_predict >= 0 else None

    @property
    def wants_thinking(self) -> bool | None:
        return None if self.think is None else bool(self.think)

    @property
    def effort(self) -> Effort | None:
        return self.think if isinstance(self.think, str) else None

    def _formats(self) -> Iterator[Structure]:
        if self.format:
            schema = ANY_OBJECT if self.format == "json" else self.format
            yield Structure(StructureKind.JSON, schema, "format")


class CalledFunction(_Lenient):
    name: Text
    arguments: dict[str, Any] = Field(default_factory=dict)


class CalledTool(_Lenient):
    function: CalledFunction


class OllamaMessage(_Lenient):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tool_name: Text | None = None
    images: NoImages = None


class OllamaChatRequest(OllamaRequest):
    """The body of `/api/chat`. Without messages, it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(few)] | None = None

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse(tuple(tool.function for tool in self.tools or ()))

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def turns(self) -> list[Turn]:
        return turns_of(self.messages or ())


class OllamaGenerateRequest(OllamaRequest):
    """The body of `/api/generate`. Without a prompt, it asks whether the model is loaded."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None  # the prompt is read as it is, without the chat template
    suffix: Annotated[object, AfterValidator(only(""))] = None
    template: Annotated[object, AfterValidator(only(""))] = None
    context: Annotated[object, AfterValidator(only([]))] = None
    images: NoImages = None
    width: Unsupported = None
    height: Unsupported = None

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse()

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def turns(self) -> list[Turn]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt or ""}]


def turns_of(messages: Sequence[OllamaMessage]) -> list[Turn]:
    """Return the messages that a chat template is given.

    Ollama's calls have no ids: a result belongs to the first call of its tool that has none yet.
    """
    turns: list[Turn] = []
    open_calls: list[tuple[str, str]] = []  # ids and names
    num_calls = 0
    for message in messages:
        turn: Turn = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            call_id = f"call{num_calls:05}"  # nine letters and digits, as Mistral's templates want them
            num_calls += 1
            open_calls.append((call_id, call.function.name))
            function = {"name": call.function.name, "arguments": call.function.arguments}
            turn.setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": function}
            )
        if message.role == "tool" and open_calls:
            answered = next((call for call in open_calls if call[1] == message.tool_name), open_calls[0])
            open_calls.remove(answered)
            turn["tool_call_id"], turn["name"] = answered
        turns.append(turn)
    return turns


class AnswerFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class AnswerCall(TypedDict):
    id: str
    function: AnswerFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]


class OllamaAnswer(TypedDict):
    """A line of a stream, or a whole answer. The last one has counts and times, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    message: NotRequired[AnswerMessage]  # of a chat
    response: NotRequired[str]  # of a generation
    thinking: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ShowRequest(_Lenient):
    model: Text | None = None
    name: Text | None = None  # the older name of `model`


class EmbedRequest(_Lenient):
    """The body of `/api/embed`. Texts beyond the context are cut, unless `truncate` is false."""

    is_whole: ClassVar[bool] = True

    model: Text | None = None
    input: Annotated[Text | Annotated[list[Text], Field(fail_fast=True)], BeforeValidator(few)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None  # 0: all
    options: Inert = None
    keep_alive: Inert = None

    def plain(self) -> EmbeddingRequest:
        """Return the request in OpenAI's words."""
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1, "truncation_side": "right"}
        dimensions = self.dimensions or None
        return EmbeddingRequest.model_validate({"input": self.input, "dimensions": dimensions, **cut})


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(TypedDict):
    models: list[OllamaModel]


class RunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(TypedDict):
    models: list[RunningModel]


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class ShownModel(TypedDict):
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]

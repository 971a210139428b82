"""`/v1/responses`: the request, and the shape of the response."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from typing_extensions import TypedDict

from server.grammar.structure import Structure, StructureKind
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import (
    MAX_INT32,
    MAX_LOGPROBS,
    Hint,
    Inert,
    RequestBody,
    Text,
    Unsupported,
    few,
    only,
    unfollowed,
)
from server.protocol.generation import Effort, GenerationRequest, Verbosity, also
from server.protocol.response_items import InputItems, OutputItem
from server.protocol.structured import JsonObjectFormat, Schema, TextFormat
from server.protocol.tools import FunctionDefinition, FunctionName, FunctionType, ToolChoice, ToolUse
from server.protocol.usage import CacheUsage, SpeculativePrefillUsage

LOGPROBS = "message.output_text.logprobs"


class JsonSchemaText(RequestBody):
    """A schema is followed whether `strict` or not."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class TextOptions(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Verbosity | None = None


class ReasoningOptions(RequestBody):
    """Reasoning is returned whole, without a summary."""

    effort: Effort | None = None
    summary: Annotated[Text | None, unfollowed("auto", "none")] = None
    generate_summary: Annotated[Inert, unfollowed("auto")] = None
    context: Annotated[Inert, unfollowed("auto")] = None
    mode: Annotated[Inert, unfollowed("standard")] = None


class _Typed(RequestBody):
    type: FunctionType


class FunctionTool(FunctionDefinition, _Typed):
    """The fields that it has beside a chat's are for tools that the server runs."""

    defer_loading: Inert = None
    allowed_callers: Inert = None
    async_: Annotated[Inert, Field(alias="async")] = None
    output_schema: Inert = None


class SkippedTool(RequestBody):
    """A tool of a kind that this server cannot run. It is left out, and reported."""

    type: Text


def _tool_kind(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    if not isinstance(kind, str) or kind == "function":
        return "function"
    ignore(f"tools.{kind}")
    return "other"


AnyTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[SkippedTool, Tag("other")],
    Discriminator(_tool_kind),
]


class NamedFunction(RequestBody):
    type: FunctionType
    name: FunctionName


class FunctionChoice(RequestBody):
    type: Literal["function"]
    name: FunctionName

    def plain(self) -> ToolChoice:
        return ToolChoice("required", (self.name,), is_named=True)


class AllowedFunctions(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1), BeforeValidator(few)]

    def plain(self) -> ToolChoice:
        return ToolChoice(self.mode, tuple(tool.name for tool in self.tools))


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Inert = None


Metadata: TypeAlias = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]


class ResponsesRequest(GenerationRequest):
    """The body of `/v1/responses`.

    Of the values of `include`, only log-probabilities have an effect: the others belong to hosted tools, or
    are always included.
    """

    # Optional as in OpenAI's schema: instructions or an earlier response can be enough.
    input: Text | InputItems | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_INT32)] | None,
        also("max_output_tokens", "max_completion_tokens", "max_tokens"),
    ] = None
    n: Annotated[object, AfterValidator(only(1))] = None
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = (
        None  # of tools that the server runs, which are none
    )
    tools: Annotated[list[AnyTool], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Text], Field(fail_fast=True), BeforeValidator(few)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    truncation: Literal["auto", "disabled"] | None = None
    access_programs: Annotated[Inert, unfollowed({}, {"cyber": "standard"})] = None
    image: Annotated[Inert, unfollowed({}, {"context_compression": "auto"})] = None
    conversation: Unsupported = None
    personality: Hint = None
    prompt: Unsupported = None
    context_management: Annotated[Inert, unfollowed([])] = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is None and self.instructions is None and self.previous_response_id is None:
            message = (
                "Missing required parameter: one of 'input', 'instructions' and 'previous_response_id' "
                "must be given."
            )
            raise invalid_value(message, "input", code="missing_required_parameter")
        return self

    @model_validator(mode="after")
    def _check_responses_options(self) -> Self:
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise invalid_value(
                f"'top_logprobs' is only allowed when 'include' has '{LOGPROBS}'.", "top_logprobs"
            )
        if self.background and self.stream:
            raise invalid_value(
                "'stream' is not supported together with 'background': poll the response instead.", "stream"
            )
        if self.background and self.store is False:
            raise invalid_value(
                "'background' needs 'store': the response is fetched from there.", "background"
            )
        if self.tool_use.choice.mode == "required" and not self.functions:
            raise invalid_value("'tool_choice' requires a call, but there are no 'tools'.", "tool_choice")
        self.tool_use.check()
        return self

    @property
    def functions(self) -> tuple[FunctionTool, ...]:
        """The tools that can be called."""
        return tuple(tool for tool in self.tools or () if isinstance(tool, FunctionTool))

    @property
    def tool_use(self) -> ToolUse:
        given = self.tool_choice
        choice = ToolChoice(given or "auto") if given is None or isinstance(given, str) else given.plain()
        return ToolUse(self.functions, choice, self.parallel_tool_calls is not False)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def _formats(self) -> Iterator[Structure]:
        match None if self.text is None else self.text.format:
            case JsonObjectFormat(structure=schema):
                yield Structure(StructureKind.JSON, schema, "text.format", is_strict=False)
            case JsonSchemaText(schema_=schema, strict=strict):
                yield Structure(StructureKind.JSON, schema, "text.format", is_strict=strict is True)

    def echo(self) -> dict[str, Any]:
        """Return the members of a response that repeat its request."""
        form = TextFormat(type="text") if self.text is None or self.text.format is None else self.text.format
        reasoning = self.reasoning or ReasoningOptions()
        choice = self.tool_choice
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": "default",
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True),
                "verbosity": (None if self.text is None else self.text.verbosity) or "medium",
            },
            "tool_choice": choice.model_dump() if isinstance(choice, RequestBody) else choice or "auto",
            "tools": [_tool(tool) for tool in self.functions],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
        } | ({} if self.user is None else {"user": self.user})


def _tool(tool: FunctionTool) -> Mapping[str, object]:
    return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    cache: CacheUsage
    speculative_prefill: NotRequired[SpeculativePrefillUsage]


class ResponseFailure(TypedDict):
    code: str
    message: str


class ResponseObject(TypedDict):
    """What a response says of itself; it also repeats its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    temperature: float
    top_p: float
    store: bool
    usage: NotRequired[ResponseUsage]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool

"""`/v1/completions`: the request, and the shapes of its answers."""

from functools import cached_property
from typing import Annotated, Literal, NotRequired, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import MAX_INT32, MAX_LOGPROBS, Text, TokenId, Unsupported, few, only
from server.protocol.generation import ChoicesRequest
from server.protocol.kept_tokens import KeptTokensField
from server.protocol.prompt_logprobs import PromptLogprobs
from server.protocol.usage import Usage

TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[Text], Field(fail_fast=True)]
Prompt: TypeAlias = Annotated[
    Text | Texts | TokenIds | Annotated[list[Text | TokenIds], Field(fail_fast=True)], BeforeValidator(few)
]


def each_prompt(prompt: Prompt) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts that a request has, each a text or token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    token_ids = tuple(item for item in prompt if isinstance(item, int))
    if token_ids:
        return (token_ids,)
    return tuple(
        item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)
    )


class CompletionRequest(ChoicesRequest):
    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    suffix: Annotated[object, AfterValidator(only(""))] = None
    add_special_tokens: bool | None = None
    question: Text | None = None
    prompt_embeds: Unsupported = None
    tools: Annotated[object, AfterValidator(only([]))] = None  # of chats

    @model_validator(mode="after")
    def _check_completion_options(self) -> Self:
        if self.token_limit == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid_value(
                "'max_tokens' may be 0 only when 'echo' is true or 'prompt_logprobs' is given.", "max_tokens"
            )
        if self.best_of is not None and self.best_of != self.num_choices:
            raise invalid_value(
                f"'best_of' is supported only when it equals 'n', which is {self.num_choices}.", "best_of"
            )
        if self.n_probs and self.num_logprobs != self.n_probs:
            ignore("n_probs")
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise invalid_value("'prompt' must not be empty.", "prompt")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs if self.logprobs is not None else self.n_probs or None

    @cached_property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        return each_prompt(self.prompt)


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry a token. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    matched_stop: NotRequired[str | int | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    kept_tokens: NotRequired[KeptTokensField | None]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage

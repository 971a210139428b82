"""What requests for text have in common: how tokens are chosen, when to stop, how the answer is delivered."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from backends.interface import SamplingParams
from server.http.errors import invalid_value, unsupported_parameter
from server.http.ignored import ignore
from server.options.speculative_prefill import Keep
from server.protocol.fields import (
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_NAMED,
    ForeignCount,
    Inert,
    RequestBody,
    Seconds,
    Text,
    TokenId,
    TruncationFields,
    few,
    only,
    unfollowed,
)
from server.protocol.foreign import ForeignFields
from server.protocol.structured import ResponseFormatFields, StructuredFields
from server.text.renderer import GenerationDefaults

T = TypeVar("T")
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning
Verbosity: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]  # of answers


class PromptCacheOptions(RequestBody):
    """OpenAI's options of prompt caching. Prompts are cached without them, as long as there is room."""

    mode: Inert = None
    ttl: Inert = None
    comparison_response_id: Inert = None
    prewarm: Annotated[object, AfterValidator(only(False))] = None  # true requests no answer


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Inert = None


def with_integer_keys(biases: dict[str, float]) -> dict[str, float]:
    wrong = [repr(key[:32]) for key in biases if re.fullmatch(r"0|[1-9][0-9]{0,9}", key) is None]
    if wrong:
        raise PydanticCustomError(
            "invalid_value", "keys must be token ids, got {keys}", {"keys": ", ".join(wrong[:8])}
        )
    return biases


def as_mapping(biases: object) -> object:
    """Return llama.cpp's list of pairs, of a token id and a bias, as a mapping."""
    if not isinstance(biases, list):
        return biases
    pairs = [pair for pair in biases if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(biases) or not all(isinstance(pair[0], int) for pair in pairs):
        return biases
    return {str(token_id): -100.0 if bias is False else bias for token_id, bias in pairs}


LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(as_mapping),
    BeforeValidator(few),
    AfterValidator(with_integer_keys),
]


def also(*names: str) -> Any:
    """Return a field that other servers call otherwise; its own name is the first one."""
    return Field(validation_alias=AliasChoices(*names))


def few_logprobs(count: int) -> int:
    if count > MAX_LOGPROBS:
        ignore("n_probs")
    return min(max(count, 0), MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """The most tokens of reasoning, and the parameter that says so."""

    num_tokens: int
    param: str


class GenerationRequest(StructuredFields, ForeignFields):
    """Fields of all families. None is an option left out."""

    is_whole: ClassVar[bool] = True

    model: Text | None = None
    stream: bool | None = None
    stop: Annotated[Text | Annotated[list[Text], Field(fail_fast=True)] | None, BeforeValidator(few)] = None
    # SGLang's: the answer ends behind the first match of a regular expression.
    stop_regex: Annotated[
        Text | Annotated[list[Text], Field(fail_fast=True)] | None, BeforeValidator(few)
    ] = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    # Extensions, named as in vLLM.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None, also("repetition_penalty", "repeat_penalty")
    ] = None
    min_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT32)] | None, also("min_tokens", "min_new_tokens")
    ] = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: Annotated[bool | None, also("include_stop_str_in_output", "no_stop_trim")] = (
        None
    )
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None

    # Ours: prefill reads the prompt's first `num_prefill_tokens` tokens, decode the others.
    num_prefill_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    # The name of the pool whose slots are used; left out, the request's length decides.
    pool: Text | None = None
    cache_policy: Text | None = None  # the older name of `pool`
    # Whether the request is refused where no slot holds all of its tokens to the answer's end.
    require_exact: bool | None = None
    # Whether a draft shortens the prompt first (left out: if it is long enough), and what it keeps of it: a
    # share of at most 1, or a number of tokens.
    speculative_prefill: bool | None = None
    speculative_prefill_keep: Keep | None = None
    # The longest wait for a slot, and the longest time of the whole request, in seconds.
    queue_timeout: Seconds | None = None
    request_timeout: Seconds | None = None

    user: Text | None = None  # the queue is fair between users if there are no API keys
    service_tier: Annotated[Inert, unfollowed("auto", "default")] = None
    safety_identifier: Inert = None
    prompt_cache_key: Inert = None
    prompt_cache_retention: Inert = None
    prompt_cache_options: PromptCacheOptions | None = None
    # Only requests with the same salt share stored prompts.
    cache_salt: Annotated[Text | None, also("cache_salt", "extra_key")] = None

    # The most tokens of reasoning, after which its end is forced; -1: no limit.
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    reasoning_budget_tokens: ForeignCount | None = None  # llama.cpp's two names of it
    thinking_budget_tokens: ForeignCount | None = None
    # Beside the log-probabilities that are requested, those of these tokens.
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_NAMED)] | None = None
    length_penalty: Annotated[Inert, unfollowed(1)] = None  # of beam search alone
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None  # llama.cpp's

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if "" in self.stop_strings:
            raise invalid_value("'stop' must not contain an empty string.", "stop")
        if self.repeat_last_n not in (None, -1) and self.repetition_penalty not in (None, 1):
            # It changes nothing without the penalty, and clients of llama.cpp send it always.
            raise unsupported_parameter("repeat_last_n", "must be -1: the penalty is of all tokens")
        limits = list(self._thinking_limits())
        for limit in limits[1:]:
            if limit.num_tokens != limits[0].num_tokens:
                ignore(limit.param)
        return self

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return _listed(self.stop)

    @property
    def thinking_budget(self) -> ThinkingLimit | None:
        """The limit that the request gives first; its own field is before other servers' spellings."""
        first = next(self._thinking_limits(), None)
        return first if first is not None and first.num_tokens >= 0 else None

    def _thinking_limits(self) -> Iterator[ThinkingLimit]:
        for param in ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"):
            count = getattr(self, param)
            if count is not None:
                yield ThinkingLimit(count, param)

    @property
    def stop_regexes(self) -> tuple[str, ...]:
        return tuple(regex for regex in _listed(self.stop_regex) if regex)

    def sampling_params(
        self, defaults: GenerationDefaults, seed: int, num_logprobs: int | None
    ) -> SamplingParams:
        """Return the sampling parameters. `defaults` are the model's, `seed` is for a request without one."""
        return SamplingParams(
            temperature=_given(self.temperature, defaults.temperature),
            top_p=max(
                _given(self.top_p, defaults.top_p), 1e-6
            ),  # 0, which OpenAI allows, keeps the most likely token alone
            top_k=max(_given(self.top_k, defaults.top_k), 0),
            min_p=_given(self.min_p, defaults.min_p),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            repetition_penalty=_given(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple(sorted((int(key), bias) for key, bias in (self.logit_bias or {}).items())),
            # -1 is no seed, as in vLLM and llama.cpp: their clients send it.
            seed=(seed if self.seed in (None, -1) else self.seed) % 2**63,
            num_logprobs=num_logprobs,
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
        )


class ChoicesRequest(GenerationRequest, ResponseFormatFields, TruncationFields):
    """Fields of the two families whose answers are numbered choices."""

    stream_options: StreamOptions | None = None
    n: Annotated[Annotated[int, Field(ge=1, le=MAX_INT32)] | None, also("n", "n_cmpl")] = None
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT32)] | None,
        also("max_tokens", "max_new_tokens"),
    ] = None
    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None  # llama.cpp's; -1 is no limit
    n_probs: Annotated[ForeignCount, AfterValidator(few_logprobs)] | None = None  # llama.cpp's logprobs

    # The answer's id ends with it.
    request_id: Annotated[
        Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None, also("request_id", "rid")
    ] = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    # Ours: which tokens of the prompt its slot holds after prefill; "heads" adds that of each layer and head.
    return_kept_tokens: bool | Literal["heads"] | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens as `token_id:5`

    metadata: Annotated[Inert, unfollowed({})] = None
    store: Annotated[Inert, unfollowed(False)] = None

    @model_validator(mode="after")
    def _check_delivery(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_value(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise invalid_value(
                "'prompt_logprobs' is not available when 'stream' is true.", "prompt_logprobs"
            )
        return self

    @property
    def num_choices(self) -> int:
        return self.n if self.n is not None else 1

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer."""
        if self.max_tokens is not None or self.n_predict is None:
            return self.max_tokens
        return None if self.n_predict < 0 else self.n_predict

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        return (
            self.includes_usage
            and self.stream_options is not None
            and bool(self.stream_options.continuous_usage_stats)
        )


def _listed(texts: str | list[str] | None) -> tuple[str, ...]:
    if texts is None:
        return ()
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value

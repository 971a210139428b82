"""Checks a request against this server's limits, and makes the engine's requests of it.

`scheduler.admission` decides once whether the backend can serve a request. This module turns a refusal into
an error of the API, which names the parameter at fault.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.datastructures import Headers

from backends.interface import BackendSpec, Feature, SamplingParams
from scheduler.admission import (
    Refusal,
    RefusalReason,
    RefusedError,
    admit,
    exact_output_tokens,
    max_output_tokens,
    route,
)
from scheduler.messages import Add, AdmittedAdd, StopCriteria
from scheduler.waiting import QueueOrder
from server.generation.task import Rendered, Task
from server.grammar.structure import Structure
from server.http.errors import ApiError, invalid_value, model_not_found, unsupported_parameter
from server.options.settings import Limits, ServerSettings
from server.protocol.generation import GenerationRequest
from server.services import Services
from server.text.question import Question, echoed

POOL_HEADER = "x-cache-pool"
CACHE_POLICY_HEADER = "x-cache-policy"  # the older name
_MAX_SEARCHES = 16  # by regular expressions, of which each is compiled in up to 7 ms


def served_model(name: str | None, settings: ServerSettings) -> str:
    """Return the name in responses for a requested model name or alias. Raises `ApiError` for another."""
    if name is None or name in settings.model_names or "*" in settings.model_names:
        return settings.model_names[0]
    raise model_not_found(name[:256])


def check_limits(request: GenerationRequest, num_prompts: int, settings: ServerSettings) -> None:
    """Check the limits that do not depend on the model. Raises `ApiError`."""
    limits = settings.limits
    for param, count, limit in _counts(request, num_prompts, limits):
        check_count(param, count, limit)
    num_sequences = num_prompts * request.num_choices
    if num_sequences > limits.max_sequences:
        raise invalid_value(
            f"{num_prompts} prompts × n = {num_sequences} exceeds this server's limit of "
            f"{limits.max_sequences}.",
            "n",
        )
    num_searches = len(request.stop_regexes) * num_sequences
    if num_searches > _MAX_SEARCHES:
        raise invalid_value(
            f"'stop_regex' × prompts × n = {num_searches} exceeds this server's limit of {_MAX_SEARCHES}.",
            "stop_regex",
        )
    for param, texts in (("stop", request.stop_strings), ("stop_regex", request.stop_regexes)):
        if any(len(text) > limits.max_stop_length for text in texts):
            raise invalid_value(
                f"'{param}' may have texts of at most {limits.max_stop_length} characters.", param
            )
    if request.priority and settings.scheduling.scheduling_order is not QueueOrder.PRIORITY:
        raise unsupported_parameter("priority", "must be 0: this server's queue is first come, first served")


def check_count(param: str, count: int, limit: int) -> None:
    """Refuse more items of a parameter than this server takes. Raises `ApiError`."""
    if count > limit:
        raise invalid_value(f"'{param}' is limited to {limit} by this server, got {count}.", param)


def _counts(request: GenerationRequest, num_prompts: int, limits: Limits) -> Iterator[tuple[str, int, int]]:
    yield "prompt", num_prompts, limits.max_prompts
    yield "n", request.num_choices, limits.max_choices
    yield "stop", len(request.stop_strings), limits.max_stop_strings
    yield "stop_token_ids", len(request.stop_token_ids or ()), limits.max_stop_token_ids
    yield "logit_bias", len(request.logit_bias or ()), limits.max_logit_bias


@dataclass(frozen=True, slots=True)
class RequestedPool:
    """The pool that a request names, in its parameter `pool` or the older `cache_policy`."""

    name: str
    param: str


def requested_pool(options: GenerationRequest, headers: Headers) -> RequestedPool | None:
    """Return the pool that fields or headers name, if any does. Raises `ApiError` if they differ."""
    named = (
        ("pool", "'pool'", options.pool),
        ("cache_policy", "'cache_policy'", options.cache_policy),
        ("pool", f"the header {POOL_HEADER}", headers.get(POOL_HEADER)),
        ("cache_policy", f"the header {CACHE_POLICY_HEADER}", headers.get(CACHE_POLICY_HEADER)),
    )
    sources = [(param, source, name) for param, source, name in named if name is not None]
    if not sources:
        return None
    param, source, name = sources[0]
    for _, other_source, other in sources[1:]:
        if other != name:
            raise invalid_value(f"{source} is {name[:64]!r}, but {other_source} says {other[:64]!r}.", param)
    return RequestedPool(name, param)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What holds for all prompts of a request."""

    tenant: str
    cache_salt: str  # separates stored prompts, beside the request's own salt
    is_background: bool
    arrival_time: float  # by the engine's clock
    pool: RequestedPool | None
    seed: int  # for a request without a seed
    structure: Structure | None  # of the answers
    grammar: str | None  # the same, compiled


def engine_requests(
    task: Task, rendered: Rendered, context: RequestContext, services: Services
) -> tuple[AdmittedAdd, ...]:
    """Return one engine request for each prompt. Raises `ApiError` for one that it can never serve."""
    return tuple(
        _engine_request(task, index, prompt, rendered.question, rendered.prediction, context, services)
        for index, prompt in enumerate(rendered.prompts)
    )


def _engine_request(
    task: Task,
    index: int,
    prompt: tuple[int, ...],
    question: Question | None,
    prediction: tuple[int, ...],
    context: RequestContext,
    services: Services,
) -> AdmittedAdd:
    options = task.options
    settings = services.settings
    spec = services.client.spec
    num_forced = 0
    if options.num_prefill_tokens is not None:
        num_forced = max(len(prompt) - options.num_prefill_tokens, 0)
    pool = _pool_index(task, len(prompt), num_forced, context.pool, spec)
    stop = _stop_criteria(task, _room(task, len(prompt), num_forced, pool, spec), services)
    read = prompt[: options.num_prefill_tokens]  # the policy must not know what decode reads later
    paragraph = echoed(
        question or Question(read, read),
        services.renderer.vocabulary,
        spec.pools[pool].policy.num_echoed,
    )
    add = Add(
        request_id=f"{task.id}-{index}",
        prompt_token_ids=prompt,
        sampling=_sampling_params(task, context, services),
        stop=stop,
        arrival_time=context.arrival_time,
        num_choices=options.num_choices,
        priority=options.priority or 0,
        queue_timeout=_shorter(options.queue_timeout, settings.scheduling.queue_timeout),
        timeout=_shorter(options.request_timeout, settings.scheduling.request_timeout),
        num_prompt_logprobs=task.num_prompt_logprobs,
        num_prefill_tokens=options.num_prefill_tokens,
        returns_kept=task.returns_kept_tokens,
        question_token_ids=paragraph.token_ids,
        question_weight=paragraph.weight,
        prediction_token_ids=prediction,
        requires_exact=bool(options.require_exact),
        pooling=task.pooling,
        pool=pool,
        grammar=context.grammar,
        tenant=context.tenant,
        cache_salt=json.dumps([context.cache_salt, options.cache_salt or ""]),
        is_background=context.is_background,
    )
    try:
        admitted = admit(add, spec)
    except RefusedError as error:
        raise _api_error(error.refusal, add, spec, task, context.structure) from error
    if stop.min_tokens > stop.max_tokens:
        raise invalid_value(
            f"'min_tokens' is {stop.min_tokens}, but at most {stop.max_tokens} tokens may be generated.",
            "min_tokens",
        )
    return admitted


def _room(task: Task, num_prompt: int, num_forced: int, pool: int, spec: BackendSpec) -> int:
    """Return how many tokens an answer may have, at least 1."""
    room = max_output_tokens(num_prompt, num_forced, spec, pool)
    if task.options.require_exact:
        room = min(room, exact_output_tokens(num_prompt, num_forced, spec, pool))
    return max(room, 1)


def _stop_criteria(task: Task, room: int, services: Services) -> StopCriteria:
    options = task.options
    max_tokens = task.max_tokens(room)
    if task.shrinks_to_room:
        max_tokens = min(max_tokens, room)
    stop_token_ids = frozenset(options.stop_token_ids or ())
    if not options.ignore_eos:
        stop_token_ids |= services.renderer.stop_token_ids
    return StopCriteria(max_tokens, options.min_tokens or 0, stop_token_ids)


def _sampling_params(task: Task, context: RequestContext, services: Services) -> SamplingParams:
    options = task.options
    if options.logprob_token_ids and task.num_logprobs is None:
        raise invalid_value(
            "'logprob_token_ids' is only allowed where log-probabilities are requested.", "logprob_token_ids"
        )
    if task.pooling is not None:
        # An embedding draws no token, so the model's default penalties must not require a feature.
        return SamplingParams(temperature=0.0)
    return options.sampling_params(services.renderer.defaults, context.seed, task.num_logprobs)


def _pool_index(
    task: Task, num_prompt: int, num_forced: int, requested: RequestedPool | None, spec: BackendSpec
) -> int:
    """Return the index of the requested pool, or of the one for the request's length.

    An answer without a limit counts as one token.
    """
    if task.pooling is not None:
        return 0  # an embedding takes no slot
    if requested is None:
        return route(num_prompt, num_forced, task.max_tokens(1), spec)
    names = [pool.name for pool in spec.pools]
    if requested.name not in names:
        raise invalid_value(
            f"'{requested.param}' must be one of this server's {', '.join(names)}, "
            f"got {requested.name[:64]!r}.",
            requested.param,
        )
    return names.index(requested.name)


def _shorter(requested: float | None, bound: float | None) -> float | None:
    """Return the shorter of two times, of which None is endless."""
    return min((seconds for seconds in (requested, bound) if seconds is not None), default=None)


def _api_error(
    refusal: Refusal, add: Add, spec: BackendSpec, task: Task, structure: Structure | None
) -> ApiError:
    """Return a refusal as clients see it."""
    param = task.prompt_param
    num_prompt = len(add.prompt_token_ids)
    match refusal.reason:
        case RefusalReason.NO_TOKENS:
            return invalid_value(f"'{param}' has no tokens.", param)
        case RefusalReason.TOKEN_ID:
            of_prompt = ("prompt_token_ids", "question_token_ids")
            where = param if refusal.field in of_prompt else str(refusal.field)
            vocabulary = f"the vocabulary has {spec.vocab_size} tokens"
            return invalid_value(f"'{where}' has token id {refusal.token_id}, but {vocabulary}.", where)
        case RefusalReason.PREFILL_LENGTH:
            return invalid_value(
                f"'num_prefill_tokens' may be at most {num_prompt}, the tokens of '{param}', "
                f"got {add.num_prefill_tokens}.",
                "num_prefill_tokens",
            )
        case RefusalReason.FEATURE if refusal.feature is not None:
            feature_param = _feature_param(refusal.feature, task, structure)
            return unsupported_parameter(feature_param, "is not supported by this server's backend")
        case RefusalReason.CONTEXT_LENGTH:
            return _context_length_exceeded(_too_long(add, spec, param), param)
        case RefusalReason.NOT_EXACT:
            return _context_length_exceeded(_not_exact(add, spec, param), "require_exact")
        case RefusalReason.SLOT_ROOM:
            return _context_length_exceeded(_no_room(add, spec, param), param)
        case _:
            message = f"This server cannot serve the request: {refusal.message}."
            return _context_length_exceeded(message, param)


def _too_long(add: Add, spec: BackendSpec, param: str) -> str:
    num_prompt = len(add.prompt_token_ids)
    max_tokens = add.stop.max_tokens
    return (
        f"{_context_limit(spec)}. However, you requested {num_prompt + max_tokens} tokens "
        f"({num_prompt} in the {param}, {max_tokens} in the completion). "
        f"Please reduce the length of the {param} or completion."
    )


def prompt_too_long(num_chars: int, spec: BackendSpec, param: str) -> ApiError:
    """Return the error about a prompt that was not even tokenized."""
    message = (
        f"{_context_limit(spec)}. However, the {param} has {num_chars} characters, which are more "
        f"tokens. Please reduce the length of the {param}."
    )
    return _context_length_exceeded(message, param)


def _no_room(add: Add, spec: BackendSpec, param: str) -> str:
    policy = spec.pools[add.pool].policy
    num_prompt = len(add.prompt_token_ids)
    max_tokens = add.stop.max_tokens
    room = max_output_tokens(num_prompt, add.num_forced_tokens, spec, add.pool)
    num_needed = policy.needed_capacity(
        num_prompt - add.num_forced_tokens, add.num_forced_tokens + max_tokens
    )
    kept = f", {policy.layout.num_kept} of them kept" if policy.layout.num_kept else ""
    return (
        f"{_context_limit(spec)}, and its cache policy admits at most {max(room, 0)} in the completion after "
        f"{num_prompt} in the {param}. However, you requested {max_tokens}, which needs a slot of at least "
        f"{num_needed} entries{kept}."
    )


def _not_exact(add: Add, spec: BackendSpec, param: str) -> str:
    num_prompt = len(add.prompt_token_ids)
    rooms = {
        pool.name: exact_output_tokens(num_prompt, add.num_forced_tokens, spec, index)
        for index, pool in enumerate(spec.pools)
    }
    best = max(rooms, key=lambda name: rooms[name])
    if rooms[best] < 1:
        longest = max(pool.policy.num_exact_tokens(spec.max_model_len) for pool in spec.pools)
        remedy = f"No pool of this server holds all of it: the longest exact sequence has {longest} tokens"
    else:
        remedy = f"Pool {best} holds up to {rooms[best]} in the completion"
    return (
        f"'require_exact' is true, but pool {spec.pools[add.pool].name} would lose tokens: "
        f"{num_prompt} are in the {param}, and {add.stop.max_tokens} in the completion. {remedy}."
    )


def _context_limit(spec: BackendSpec) -> str:
    return f"This model's maximum context length is {spec.max_model_len} tokens"


def _context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, "context_length_exceeded", message, param=param)


def _feature_param(feature: Feature, task: Task, structure: Structure | None) -> str:
    """Return the parameter that needs a feature of the backend."""
    options = task.options
    match feature:
        case Feature.SAMPLING:
            return "temperature"
        case Feature.PENALTIES:
            penalties = ("presence_penalty", "frequency_penalty")
            return next((name for name in penalties if getattr(options, name)), "repetition_penalty")
        case Feature.LOGIT_BIAS:
            return "logit_bias"
        case Feature.BANNED_TOKENS:
            return "min_tokens"
        case Feature.LOGPROBS:
            return "logprobs"
        case Feature.PROMPT_LOGPROBS:
            return "echo" if getattr(options, "prompt_logprobs", None) is None else "prompt_logprobs"
        case Feature.FORCED_TOKENS:
            return "num_prefill_tokens"
        case Feature.KEPT_TOKENS:
            return "return_kept_tokens"
        case Feature.TOKEN_MASK:
            return "structured_outputs" if structure is None else structure.param

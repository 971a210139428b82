"""What this server lets one request ask for: its own limits, the backend's abilities, the length of a sequence.

Every refusal names the parameter. The scheduler would refuse most of it too, but later, and it knows no parameter of the API.
"""

from collections.abc import Iterator

from backends.interface import BackendSpec, Feature
from scheduler.admission import refusal
from scheduler.messages import Add
from server.grammar.structure import Structure
from server.http.errors import ApiError, invalid_value, model_not_found, unsupported_parameter
from server.options.settings import Limits, ServerSettings
from server.protocol.generation import GenerationRequest


def served_model(name: str | None, settings: ServerSettings) -> str:
    """Return the name that answers carry, for any of the names that a client may use. Raises `ApiError` for another."""
    if name is None or name in settings.model_names or "*" in settings.model_names:
        return settings.model_names[0]
    raise model_not_found(name[:256])


def check_limits(request: GenerationRequest, num_prompts: int, settings: ServerSettings) -> None:
    """Refuse what exceeds this server's limits, whatever its model. Raises `ApiError`."""
    limits = settings.limits
    for param, number, limit in _counts(request, num_prompts, limits):
        if number > limit:
            raise invalid_value(f"'{param}' is limited to {limit} by this server, got {number}.", param)
    num_sequences = num_prompts * request.num_choices
    if num_sequences > limits.max_sequences:
        raise invalid_value(
            f"{num_prompts} prompts × n = {num_sequences} exceeds this server's limit of {limits.max_sequences}.",
            "n",
        )
    if any(len(stop) > limits.max_stop_length for stop in request.stop_strings):
        raise invalid_value(f"A stop string may have at most {limits.max_stop_length} characters.", "stop")
    if request.priority and not settings.priority_is_honoured:
        raise unsupported_parameter("priority", "must be 0: this server's queue is first come, first served")


def _counts(request: GenerationRequest, num_prompts: int, limits: Limits) -> Iterator[tuple[str, int, int]]:
    yield "prompt", num_prompts, limits.max_prompts
    yield "n", request.num_choices, limits.max_choices
    yield "stop", len(request.stop_strings), limits.max_stop_strings
    yield "stop_token_ids", len(request.stop_token_ids or ()), limits.max_stop_token_ids
    yield "logit_bias", len(request.logit_bias or ()), limits.max_logit_bias


def check_vocabulary(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse token ids that the model does not have. Raises `ApiError`."""
    for param, token_ids in (
        ("logit_bias", map(int, request.logit_bias or ())),
        ("stop_token_ids", request.stop_token_ids or ()),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise invalid_value(
                    f"'{param}' has token id {token_id}, but the vocabulary has {vocab_size} tokens.", param
                )


def check_prompt(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Refuse a prompt that is none, or that has tokens which the model does not have. Raises `ApiError`."""
    if not token_ids:
        raise invalid_value(f"'{param}' has no tokens.", param)
    if max(token_ids) >= vocab_size:
        raise invalid_value(
            f"'{param}' has token id {max(token_ids)}, but the vocabulary has {vocab_size} tokens.", param
        )


def check_prefill(num_prefill_tokens: int | None, num_prompt_tokens: int, param: str) -> None:
    """Refuse to read more of a prompt than there is. Raises `ApiError`."""
    if num_prefill_tokens is not None and num_prefill_tokens > num_prompt_tokens:
        raise invalid_value(
            f"'num_prefill_tokens' may be at most {num_prompt_tokens}, the tokens of '{param}', got {num_prefill_tokens}.",
            "num_prefill_tokens",
        )


def pool_named(name: str, spec: BackendSpec) -> int:
    """Return the number of a pool. Raises `ApiError` if there is none of this name."""
    names = [pool.name for pool in spec.pools]
    if name not in names:
        raise invalid_value(
            f"'cache_policy' must be one of this server's {', '.join(names)}, got {name[:64]!r}.",
            "cache_policy",
        )
    return names.index(name)


def check_structure(structure: Structure, features: frozenset[Feature]) -> None:
    """Refuse a form of the answer that the backend cannot keep to. Raises `ApiError`."""
    if Feature.TOKEN_MASK not in features:
        raise unsupported_parameter(structure.param, "is not supported by this server's backend")


def check_features(request: GenerationRequest, add: Add, features: frozenset[Feature]) -> None:
    """Refuse what the backend cannot honour. Raises `ApiError`."""
    needed = set(add.sampling.required_features())
    if add.stop.min_tokens > 0 and add.stop.stop_token_ids:
        needed.add(Feature.BANNED_TOKENS)
    if add.num_prompt_logprobs is not None:
        needed.add(Feature.PROMPT_LOGPROBS)
    if add.num_forced_tokens > 0:
        needed.add(Feature.FORCED_TOKENS)
    for feature in sorted(needed - features, key=lambda feature: feature.value):
        raise unsupported_parameter(_param_of(feature, request), "is not supported by this server's backend")


def _param_of(feature: Feature, request: GenerationRequest) -> str:
    if feature is Feature.PENALTIES:
        return next(
            (name for name in ("presence_penalty", "frequency_penalty") if getattr(request, name)),
            "repetition_penalty",
        )
    return {
        Feature.SAMPLING: "temperature",
        Feature.LOGIT_BIAS: "logit_bias",
        Feature.BANNED_TOKENS: "min_tokens",
        Feature.LOGPROBS: "logprobs",
        Feature.PROMPT_LOGPROBS: "echo"
        if getattr(request, "prompt_logprobs", None) is None
        else "prompt_logprobs",
        Feature.FORCED_TOKENS: "num_prefill_tokens",
    }[feature]


def check_length(
    num_prompt_tokens: int,
    num_forced_tokens: int,
    max_tokens: int,
    room: int,
    spec: BackendSpec,
    pool: int,
    param: str,
) -> None:
    """Refuse what is longer than a sequence may be, or than the pool's cache policy has `room` for. Raises `ApiError`."""
    total = num_prompt_tokens + max_tokens
    limit = f"This model's maximum context length is {spec.max_model_len} tokens"
    if total > spec.max_model_len:
        raise context_length_exceeded(
            f"{limit}. However, you requested {total} tokens ({num_prompt_tokens} in the {param}, {max_tokens} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param,
        )
    if max_tokens > room:
        policy = spec.pools[pool].policy
        needed = policy.needed_capacity(num_prompt_tokens - num_forced_tokens, num_forced_tokens + max_tokens)
        kept = f", {policy.layout.num_kept} of them kept" if policy.layout.num_kept else ""
        raise context_length_exceeded(
            f"{limit}, and its cache policy admits at most {max(room, 0)} in the completion after {num_prompt_tokens} in the {param}. "
            f"However, you requested {max_tokens}, which needs a slot of at least {needed} entries{kept}.",
            param,
        )


def check_admissible(add: Add, spec: BackendSpec, param: str) -> None:
    """Refuse what the backend can never serve. Raises `ApiError`."""
    why = refusal(add, spec)
    if why is not None:
        raise context_length_exceeded(f"This server cannot serve the request: {why}.", param)


def context_length_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, "context_length_exceeded", message, param=param)

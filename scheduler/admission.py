"""Whether a backend can ever serve a request. Decided once, from the request and the backend's spec alone."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.interface import BackendSpec, Feature
from scheduler.messages import Add, AdmittedAdd


class RefusalReason(enum.Enum):
    NO_TOKENS = "no_tokens"
    PREFILL_LENGTH = "prefill_length"  # `num_prefill_tokens` is outside the prompt
    TOKEN_ID = "token_id"  # outside the vocabulary
    CONTEXT_LENGTH = "context_length"  # prompt and answer exceed `max_model_len`
    SLOT_ROOM = "slot_room"  # the pool's policy has no room for an answer of this length
    NOT_EXACT = "not_exact"  # the slot would lose tokens, and the request forbids it
    FEATURE = "feature"  # the backend does not support a feature
    SCRATCH = "scratch"  # the prompt fits neither a slot nor a scratch


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request cannot be served. `message` is a sentence with the numbers, fit for a client."""

    reason: RefusalReason
    message: str
    feature: Feature | None = None
    field: str | None = None  # of `Add` or its parts: the one that holds `token_id`
    token_id: int | None = None


class RefusedError(ValueError):
    """The request can never be served, even by an idle server."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def admit(add: Add, spec: BackendSpec) -> AdmittedAdd:
    """Check the request and return it in the type that the scheduler accepts. Raises `RefusedError`."""
    model, pool = spec.model_of(add.pool)
    for refusal in _refusals(replace(add, pool=pool), spec.models[model]):
        raise RefusedError(refusal)
    return AdmittedAdd(add)


def route(num_prompt_tokens: int, num_forced_tokens: int, max_tokens: int, spec: BackendSpec) -> int:
    """Return the index of a sequence's pool.

    It is the first pool that loses nothing of the sequence, else the first that admits it, else the one with
    the most room. The choice depends on the request alone, so an answer does not depend on other requests.
    """
    pools = range(len(spec.pools))
    rooms = [max_output_tokens(num_prompt_tokens, num_forced_tokens, spec, pool) for pool in pools]
    admitting = [pool for pool, room in enumerate(rooms) if max_tokens <= room]
    num_written = num_prompt_tokens + max_tokens - 1  # the last token is sampled and never written
    num_prefill_tokens = num_prompt_tokens - num_forced_tokens
    for pool in admitting:
        if spec.pools[pool].policy.is_exact(num_prefill_tokens, num_written):
            return pool
    return admitting[0] if admitting else rooms.index(max(rooms))


def needs_scratch(add: Add, spec: BackendSpec) -> bool:
    """Return whether the prompt is read in a scratch: it has no slot, or its slot
    cannot hold it in order.
    """
    num_prefill_tokens = len(add.prompt_token_ids) - add.num_forced_tokens
    return not add.needs_slot or num_prefill_tokens > spec.pools[add.pool].max_direct_tokens


def max_output_tokens(num_prompt_tokens: int, num_forced_tokens: int, spec: BackendSpec, pool: int) -> int:
    """Return how many tokens may follow a prompt at most; negative when the prompt itself is too long.

    The prompt's last `num_forced_tokens` tokens are read by decode.
    """
    policy = spec.pools[pool].policy
    num_prefill_tokens = num_prompt_tokens - num_forced_tokens
    return policy.max_output_tokens(num_prefill_tokens, spec.max_model_len) - num_forced_tokens


def exact_output_tokens(num_prompt_tokens: int, num_forced_tokens: int, spec: BackendSpec, pool: int) -> int:
    """Return how many tokens may follow a prompt before its slot loses any; negative if it already does."""
    policy = spec.pools[pool].policy
    num_prefill_tokens = num_prompt_tokens - num_forced_tokens
    return policy.exact_output_tokens(num_prefill_tokens, spec.max_model_len) - num_forced_tokens


def required_features(add: Add) -> frozenset[Feature]:
    """Return the features that the request requires of a backend beyond greedy decoding."""
    required = set(add.sampling.required_features())
    if add.stop.min_tokens > 0 and add.stop.stop_token_ids:
        required.add(Feature.BANNED_TOKENS)
    if add.num_prompt_logprobs is not None:
        required.add(Feature.PROMPT_LOGPROBS)
    if add.num_forced_tokens > 0:
        required.add(Feature.FORCED_TOKENS)
    if add.returns_kept:
        required.add(Feature.KEPT_TOKENS)
    if add.grammar is not None:
        required.add(Feature.TOKEN_MASK)
    return frozenset(required)


def _refusals(add: Add, spec: BackendSpec) -> Iterator[Refusal]:
    yield from _token_refusals(add, spec)
    yield from _length_refusals(add, spec)
    yield from _exactness_refusals(add, spec)
    yield from _feature_refusals(add, spec)
    if needs_scratch(add, spec):
        yield from _scratch_refusals(len(add.prompt_token_ids) - add.num_forced_tokens, spec)


def _token_refusals(add: Add, spec: BackendSpec) -> Iterator[Refusal]:
    prompt = add.prompt_token_ids
    if not prompt:
        yield Refusal(RefusalReason.NO_TOKENS, "the prompt has no tokens")
        return
    biased = tuple(token_id for token_id, _ in add.sampling.logit_bias)
    checked = {
        "logit_bias": biased,
        "stop_token_ids": tuple(sorted(add.stop.stop_token_ids)),
        "logprob_token_ids": add.sampling.logprob_token_ids,
        "prompt_token_ids": (min(prompt), max(prompt)),
        "question_token_ids": add.question_token_ids,
        "prediction_token_ids": add.prediction_token_ids,
    }
    for field, token_ids in checked.items():
        for token_id in token_ids:
            if not 0 <= token_id < spec.vocab_size:
                message = f"token id {token_id} is outside the vocabulary of {spec.vocab_size} tokens"
                yield Refusal(RefusalReason.TOKEN_ID, message, field=field, token_id=token_id)
    if add.num_prefill_tokens is not None and not 1 <= add.num_prefill_tokens <= len(prompt):
        yield Refusal(
            RefusalReason.PREFILL_LENGTH,
            f"num_prefill_tokens must be from 1 to the prompt's {len(prompt)} tokens, "
            f"got {add.num_prefill_tokens}",
        )


def _length_refusals(add: Add, spec: BackendSpec) -> Iterator[Refusal]:
    num_prompt = len(add.prompt_token_ids)
    max_tokens = add.stop.max_tokens
    if num_prompt + max_tokens > spec.max_model_len:
        yield Refusal(
            RefusalReason.CONTEXT_LENGTH,
            f"the prompt has {num_prompt} tokens and up to {max_tokens} are requested, "
            f"{num_prompt + max_tokens} in all, but a sequence may have at most {spec.max_model_len}",
        )
    room = max_output_tokens(num_prompt, add.num_forced_tokens, spec, add.pool)
    if max_tokens > room:
        yield Refusal(
            RefusalReason.SLOT_ROOM,
            f"up to {max_tokens} tokens are requested, but policy {spec.pools[add.pool].policy.name} "
            f"admits at most {room} after {num_prompt} prompt tokens",
        )


def _exactness_refusals(add: Add, spec: BackendSpec) -> Iterator[Refusal]:
    num_prompt = len(add.prompt_token_ids)
    room = exact_output_tokens(num_prompt, add.num_forced_tokens, spec, add.pool)
    if add.requires_exact and add.needs_slot and add.stop.max_tokens > room:
        yield Refusal(
            RefusalReason.NOT_EXACT,
            f"a slot of pool {spec.pools[add.pool].name} would lose tokens of a prompt of {num_prompt} and "
            f"{add.stop.max_tokens} more",
        )


def _feature_refusals(add: Add, spec: BackendSpec) -> Iterator[Refusal]:
    for feature in sorted(required_features(add) - spec.features, key=lambda feature: feature.value):
        message = f"the backend does not support {feature.value}"
        yield Refusal(RefusalReason.FEATURE, message, feature=feature)
    if add.pooling is not None and spec.embedding_size == 0:
        yield Refusal(RefusalReason.FEATURE, "the backend does not support embeddings")


def _scratch_refusals(num_tokens: int, spec: BackendSpec) -> Iterator[Refusal]:
    scratch = spec.scratch
    if scratch.num_scratch == 0:
        message = (
            f"a prompt of {num_tokens} tokens that sinks and ring do not hold, or that is only scored, needs "
            "a scratch, and the backend has 0"
        )
        yield Refusal(RefusalReason.SCRATCH, message)
    elif not scratch.layout.admits(num_tokens):
        message = (
            f"the prompt has {num_tokens} tokens, but a scratch holds at most {scratch.layout.max_tokens}"
        )
        yield Refusal(RefusalReason.SCRATCH, message)

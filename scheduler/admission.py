"""Which requests a backend can never serve, whatever is free, and the sentence that says why."""

from backends.interface import BackendSpec, Feature
from scheduler.messages import Add


def refusal(add: Add, spec: BackendSpec) -> str | None:
    """Return why this request cannot be served, with the numbers, or None when it can."""
    return _feature_refusal(add, spec) or _token_refusal(add, spec) or _length_refusal(add, spec)


def route(num_prompt_tokens: int, num_forced_tokens: int, max_tokens: int, spec: BackendSpec) -> int:
    """Return the pool of a sequence: the first that loses nothing of it, else the first that admits it, else the one with the most room.

    It follows from the request alone, so that what is answered does not depend on who else is there.
    """
    rooms = [
        max_output_tokens(num_prompt_tokens, num_forced_tokens, spec, pool) for pool in range(len(spec.pools))
    ]
    admitting = [pool for pool, room in enumerate(rooms) if max_tokens <= room]
    num_written = num_prompt_tokens + max_tokens - 1  # the last token drawn never is
    num_prefill_tokens = num_prompt_tokens - num_forced_tokens
    exact = (pool for pool in admitting if spec.pools[pool].policy.is_exact(num_prefill_tokens, num_written))
    return next(exact, next(iter(admitting), rooms.index(max(rooms))))


def needs_scratch(add: Add, spec: BackendSpec) -> bool:
    """Whether the prompt is read in a scratch: it loses something in a slot, or it gets none because it is only scored."""
    return (
        not add.needs_slot
        or len(add.prompt_token_ids) - add.num_forced_tokens > spec.pools[add.pool].max_direct_tokens
    )


def max_output_tokens(num_prompt_tokens: int, num_forced_tokens: int, spec: BackendSpec, pool: int) -> int:
    """Return how many tokens may follow a prompt whose last `num_forced_tokens` decode reads; negative when it is too long itself."""
    num_prefill_tokens = num_prompt_tokens - num_forced_tokens
    return (
        spec.pools[pool].policy.max_output_tokens(num_prefill_tokens, spec.max_model_len) - num_forced_tokens
    )


def _feature_refusal(add: Add, spec: BackendSpec) -> str | None:
    needed = set(add.sampling.required_features())
    if add.stop.min_tokens > 0 and add.stop.stop_token_ids:
        needed.add(Feature.BANNED_TOKENS)
    if add.num_prompt_logprobs is not None:
        needed.add(Feature.PROMPT_LOGPROBS)
    if add.num_forced_tokens > 0:
        needed.add(Feature.FORCED_TOKENS)
    if add.grammar is not None:
        needed.add(Feature.TOKEN_MASK)
    lacking = sorted(feature.value for feature in needed - spec.features)
    if add.pooling is not None and spec.embedding_size == 0:
        lacking.append("embeddings")
    return f"the backend does not support {', '.join(lacking)}" if lacking else None


def _token_refusal(add: Add, spec: BackendSpec) -> str | None:
    if not add.prompt_token_ids:
        return "the prompt has no tokens"
    if add.num_prefill_tokens is not None and not 1 <= add.num_prefill_tokens <= len(add.prompt_token_ids):
        return f"num_prefill_tokens must be from 1 to the prompt's {len(add.prompt_token_ids)} tokens, got {add.num_prefill_tokens}"
    biased = (token_id for token_id, _ in add.sampling.logit_bias)
    for token_id in (min(add.prompt_token_ids), max(add.prompt_token_ids), *add.stop.stop_token_ids, *biased):
        if not 0 <= token_id < spec.vocab_size:
            return f"token id {token_id} is outside the vocabulary of {spec.vocab_size} tokens"
    return None


def _length_refusal(add: Add, spec: BackendSpec) -> str | None:
    num_prompt, max_tokens = len(add.prompt_token_ids), add.stop.max_tokens
    if num_prompt + max_tokens > spec.max_model_len:
        return (
            f"the prompt has {num_prompt} tokens and up to {max_tokens} are asked for, {num_prompt + max_tokens} in all, "
            f"but a sequence may have at most {spec.max_model_len}"
        )
    policy = spec.pools[add.pool].policy
    limit = max_output_tokens(num_prompt, add.num_forced_tokens, spec, add.pool)
    if max_tokens > limit:
        return f"up to {max_tokens} tokens are asked for, but policy {policy.name} admits at most {limit} after {num_prompt} prompt tokens"
    if needs_scratch(add, spec):
        return _scratch_refusal(num_prompt - add.num_forced_tokens, spec)
    return None


def _scratch_refusal(num_prompt: int, spec: BackendSpec) -> str | None:
    scratch = spec.scratch
    if scratch.num_scratch == 0:
        return f"a prompt of {num_prompt} tokens that is longer than a slot, or only scored, is read in a scratch, of which there are 0"
    if not scratch.layout.admits(num_prompt):
        return f"the prompt has {num_prompt} tokens, but the scratch it is read in holds at most {scratch.layout.max_tokens}"
    return None

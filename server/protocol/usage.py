"""Token counts, as the API reports them."""

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class CacheUsage(TypedDict):
    """Ours: what the slots of the choices that have ended hold.

    `pool` is the name of the slots' pool; several names where prompts of one request went to different pools.
    `policy` is the same name under its older key. Counts are those of a full-attention layer: tokens held at
    the end, tokens evicted, and tokens written for each one held. Packed tokens are those predicted from a
    slot, and not by the full attention of prefill.
    """

    pool: str
    policy: str
    kept_tokens: int
    evicted_tokens: int
    compression: float
    packed_prompt_tokens: int
    packed_completion_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cache: CacheUsage


def usage(
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    num_reasoning_tokens: int,
    cache: CacheUsage,
) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "cache": cache,
    }

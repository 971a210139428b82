"""Token counts, as the API reports them."""

from typing import NotRequired

from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Prediction tokens are those that were guessed, from the request's prediction or from its own text."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CacheUsage(TypedDict):
    """Ours: what the slots of the choices that have ended hold.

    `pool` is the name of the slots' pool; several names where prompts of one request went to different pools.
    `policy` is the same name under its older key. Counts are those of a full-attention layer: tokens held at
    the end, tokens evicted, and tokens written for each one held. Packed tokens are those predicted from a
    slot, and not by the full attention of prefill. With policy sparse, `quantized_tokens` are those held in 4
    bits.
    """

    pool: str
    policy: str
    kept_tokens: int
    evicted_tokens: int
    compression: float
    packed_prompt_tokens: int
    packed_completion_tokens: int
    quantized_tokens: NotRequired[int]


class SpeculativePrefillUsage(TypedDict):
    """Ours, where a draft was to shorten the prompt: what came of it, and the tokens that each model read.

    `read_tokens` are those of the model that answers, restored ones included. `draft_tokens` are the draft's;
    0 if it had read the same prompt before. `read_token_ids` come with `return_token_ids`.
    """

    outcome: str
    read_tokens: int
    draft_tokens: int
    read_token_ids: NotRequired[list[int]]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cache: CacheUsage
    speculative_prefill: NotRequired[SpeculativePrefillUsage]


def usage(
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    details: CompletionTokensDetails,
    cache: CacheUsage,
    speculative_prefill: SpeculativePrefillUsage | None = None,
) -> Usage:
    whole: Usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": details,
        "cache": cache,
    }
    if speculative_prefill is not None:
        whole["speculative_prefill"] = speculative_prefill
    return whole

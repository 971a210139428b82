"""The log-probabilities of a prompt, as vLLM returns them.

Each token has one entry with its own and the likeliest tokens by id. The entry of the first token is null.
"""

from collections.abc import Sequence
from typing import TypeAlias

from typing_extensions import TypedDict

from server.text.logprobs import TokenLogprob, finite


class PromptLogprob(TypedDict):
    """`rank` is 1 for the likeliest token, and null for a token below the requested alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> PromptLogprobs:
    """Return the entries of a prompt's tokens with `num_top` alternatives each."""
    return [None if token.logprob is None else _entry(token, num_top) for token in tokens]


def _entry(token: TokenLogprob, num_top: int) -> dict[str, PromptLogprob]:
    ranks = {other.token_id: rank for rank, other in enumerate(token.top, start=1)}
    listed = {other.token_id: other for other in (token, *token.top[:num_top])}
    return {
        str(token_id): {
            "logprob": finite(other.logprob),
            "rank": ranks.get(token_id),
            "decoded_token": other.token,
        }
        for token_id, other in listed.items()
    }

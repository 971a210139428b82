"""Log-probabilities as JSON can say them."""

from typing import Final

LEAST: Final = -9999.0  # what OpenAI says for a token that cannot be: JSON has no infinity


def finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)

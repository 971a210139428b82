"""Log-probabilities of tokens: what a token is reported with, and as what number."""

from dataclasses import dataclass, replace
from typing import Final

LEAST: Final = -9999.0  # OpenAI's value for a token that is impossible: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability (None: the first token of a prompt); `top` has the most likely tokens at its place, best first."""

    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()

    def by_id(self) -> "TokenLogprob":
        """Return the same, with ids for names."""
        return replace(
            self, token=f"token_id:{self.token_id}", top=tuple(other.by_id() for other in self.top)
        )


def finite(logprob: float | None) -> float:
    """Return a log-probability that JSON can hold."""
    return LEAST if logprob is None else max(logprob, LEAST)

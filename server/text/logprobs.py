"""Log-probabilities of tokens, as answers report them."""

from dataclasses import dataclass, replace
from typing import Final

MIN_LOGPROB: Final = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability, which is None for a prompt's first token.

    `top` are the most likely tokens at the same position, most likely first. `named` are others, which the
    request names.
    """

    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()
    named: tuple["TokenLogprob", ...] = ()

    def by_id(self) -> "TokenLogprob":
        """Return the same with each token's text replaced by `token_id:<id>`."""
        top, named = (tuple(other.by_id() for other in others) for others in (self.top, self.named))
        return replace(self, token=f"token_id:{self.token_id}", top=top, named=named)


def finite(logprob: float | None) -> float:
    """Return a log-probability that JSON can represent."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)

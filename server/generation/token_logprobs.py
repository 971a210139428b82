"""A generated token's log-probabilities, as chats and responses tell them."""

from server.protocol.chat import ChatTokenLogprob, TopLogprob
from server.text.logprobs import TokenLogprob, finite


def token_logprob(token: TokenLogprob) -> ChatTokenLogprob:
    """Return a token with its alternatives."""
    return {**_top_logprob(token), "top_logprobs": [_top_logprob(other) for other in token.top]}


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.bytes)}

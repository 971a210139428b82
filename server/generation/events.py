"""What a request's generation reports, in order, in terms of text. No HTTP, and no family of the API."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from backends.interface import KeptTokens
from scheduler.messages import Final
from server.text.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took the request: response headers may go out."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt has been read."""

    num_computed_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class DraftProgress:
    """How much of the prompt a draft has read, in the draft's tokens."""

    num_read: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft is done with the prompt, of which the model reads `read_token_ids` in `pool`.

    `num_draft_tokens` is 0 if the draft's scores were remembered.
    """

    outcome: str
    read_token_ids: tuple[int, ...]
    num_draft_tokens: int
    pool: str

    @property
    def num_read_tokens(self) -> int:
        return len(self.read_token_ids)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The whole prompt, token by token. Comes once, before any text of choice 0, if it was requested."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """Which tokens of the prompt its slot holds, and their texts. Comes once, if it was requested."""

    texts: tuple[str, ...]
    kept: KeptTokens


@dataclass(frozen=True, slots=True)
class Embedding:
    """The prompt as one vector. Comes once, at the prompt's end, if it was requested."""

    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next piece of one choice's answer.

    `token_ids` and `logprobs` belong to the tokens whose text this piece completes. Text is held back while
    it is half a character or the possible start of a stop string. `logprobs` is empty unless requested, and
    has no stop token.

    `final` is set in a choice's last delta, with its `finish_reason`. There `stop_reason` is the stop string
    or the request's stop token id, and `final.num_output_tokens` is the number for usage.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    final: Final | None = None

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or token that ended the choice; the model's own end tokens count too."""
        if self.stop_reason is not None or self.final is None:
            return self.stop_reason
        return self.final.stop_token_id

    def followed_by(self, last: "ChoiceDelta") -> "ChoiceDelta":
        """Return this delta and the same choice's last one as one delta."""
        return replace(
            last,
            text=self.text + last.text,
            token_ids=self.token_ids + last.token_ids,
            logprobs=self.logprobs + last.logprobs,
        )


Event: TypeAlias = (
    Accepted | Progress | DraftProgress | Drafted | PromptLogprobs | Kept | Embedding | ChoiceDelta
)


class GenerationError(Exception):
    """A choice ended for another reason than stop or length: rejected, timed out, failed, or aborted."""

    def __init__(self, final: Final) -> None:
        super().__init__(final.message or final.reason.value)
        self.final = final


class SlowReaderError(Exception):
    """The client reads its answer more slowly than it is made, and lags too far behind."""

    def __init__(self, max_lag: float) -> None:
        super().__init__(f"the answer was read more than {max_lag:g} s after it was made")
        self.max_lag = max_lag

"""The outputs of one request as text: what a route turns into chunks or a body.

Knows tokens, text and stop strings; knows no HTTP. A stop string is found here, and the engine is told which token its answer ended at.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from scheduler.messages import Add, Final
from server.client import EngineClient
from server.renderer import Renderer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability (None: the first token of a prompt); `top` has the most likely tokens at its place, best first."""

    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took the request: response headers may go out."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt has been read."""

    num_computed_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The whole prompt, token by token; comes once, before any text of choice 0, if the request asked for it."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next piece of one choice's answer.

    `token_ids` and `logprobs` are those of the tokens whose text is complete with this piece: a token whose text is held back (half a
    character, or perhaps the beginning of a stop string) comes with the piece that releases it. `logprobs` is empty unless they were asked
    for, and leaves out a stop token that is no part of the text. With `final` set (the choice's last delta) `finish_reason` says how it
    ended, `stop_reason` which stop string or which of the request's stop token ids it was, and `final.num_output_tokens` is what counts
    in usage.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    final: Final | None = None


Event: TypeAlias = Accepted | Progress | PromptLogprobs | ChoiceDelta


class GenerationError(Exception):
    """A choice ended for another reason than stop or length: rejected, a deadline, a failure, or an abort by the server."""

    def __init__(self, final: Final) -> None:
        super().__init__(final.message or final.reason.value)
        self.final = final


class Generation:
    """The events of one request, in order: an async iterator, to be used with `contextlib.aclosing`, which aborts what is unfinished.

    `Accepted` is the first event. Ends after every choice's last delta; raises `GenerationError` as soon as a choice ends in error.
    `continues_prompt` keeps a leading space of the answer that some tokenizers would drop at the start of a text: right for raw completions.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        add: Add,
        *,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        continues_prompt: bool = False,
    ) -> None:
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Stop listening; choices that have not ended are aborted."""
        raise NotImplementedError

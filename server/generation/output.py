"""The outputs of one request as text: what a route turns into chunks or a body.

Knows tokens, text and stop strings; knows no HTTP. A stop string is found here, and the engine is told which token its answer ended at.
"""

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from backends.interface import SampledToken
from scheduler.messages import Add, EngineOutput, Final, FinishReason
from server.engine.client import EngineClient
from server.text.detokenizer import Detokenizer
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer
from server.text.stop_strings import StopString


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
class Embedding:
    """The prompt as one vector; comes once, at its end, if the request asked for it."""

    vector: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The next piece of one choice's answer.

    `token_ids` and `logprobs` are those of the tokens whose text is complete with this piece: a token whose text is held back (half a
    character, or perhaps the beginning of a stop string) comes with the piece that releases it. `logprobs` is empty unless they were asked
    for, and leaves out a stop token. With `final` set (the choice's last delta) `finish_reason` says how it
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

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or token that ended the choice, the model's own end tokens among them."""
        return (
            self.stop_reason
            if self.stop_reason is not None or self.final is None
            else self.final.stop_token_id
        )

    def followed_by(self, last: "ChoiceDelta") -> "ChoiceDelta":
        """Return both in one: `last` is the same choice's last delta."""
        return replace(
            last,
            text=self.text + last.text,
            token_ids=self.token_ids + last.token_ids,
            logprobs=self.logprobs + last.logprobs,
        )


Event: TypeAlias = Accepted | Progress | PromptLogprobs | Embedding | ChoiceDelta


class GenerationError(Exception):
    """A choice ended for another reason than stop or length: rejected, a deadline, a failure, or an abort by the server."""

    def __init__(self, final: Final) -> None:
        super().__init__(final.message or final.reason.value)
        self.final = final


@dataclass(slots=True)
class _Choice:
    """One choice's text so far, and the tokens whose text is not out yet."""

    detokenizer: Detokenizer
    pending: deque[SampledToken] = field(default_factory=deque)


class Generation:
    """The events of one request, in order: an async iterator, to be used with `contextlib.aclosing`, which aborts what is unfinished.

    `Accepted` is the first event. Ends after every choice's last delta; raises `GenerationError` as soon as a choice ends in error.
    `continues_prompt` keeps a leading space that some tokenizers drop at the start of a text: right for raw completions.
    `kept_token_ids` are special tokens whose text is wanted.
    """

    def __init__(
        self,
        client: EngineClient,
        renderer: Renderer,
        add: Add,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        continues_prompt: bool = False,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._client, self._vocabulary, self._add = client, renderer.vocabulary, add
        self._eos_token_ids = renderer.stop_token_ids
        self._include_stop = include_stop_str_in_output
        strings = [StopString(text) for text in stop]
        self._choices = [
            _Choice(
                Detokenizer(
                    renderer.vocabulary,
                    strings,
                    include_stop_string=include_stop_str_in_output,
                    skip_special_tokens=skip_special_tokens,
                    kept_token_ids=kept_token_ids,
                    continues_text=continues_prompt,
                    min_tokens=add.stop.min_tokens,
                )
            )
            for _ in range(add.num_choices)
        ]
        self._num_computed = 0
        self._events = self._run()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Stop listening; choices that have not ended are aborted."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[Event, None]:
        is_accepted = False
        async with contextlib.aclosing(self._client.generate(self._add)) as outputs:
            async for output in outputs:
                if output.final is not None and output.final.reason not in (
                    FinishReason.STOP,
                    FinishReason.LENGTH,
                ):
                    raise GenerationError(output.final)
                if not is_accepted:
                    is_accepted = True
                    yield Accepted()
                for event in self._read(output):
                    yield event

    def _read(self, output: EngineOutput) -> list[Event]:
        events: list[Event] = []
        if output.num_computed_prompt_tokens > self._num_computed:
            self._num_computed = output.num_computed_prompt_tokens
            events.append(Progress(self._num_computed))
        if output.prompt_logprobs:
            first = self._token_logprob(SampledToken(self._add.prompt_token_ids[0]))
            events.append(PromptLogprobs((first, *map(self._token_logprob, output.prompt_logprobs))))
        if output.tokens:
            events += self._push(output)
        if output.embedding:
            events.append(Embedding(output.embedding))
        if output.final is not None:
            events.append(self._last_delta(output.choice, output.final))
        return events

    def _push(self, output: EngineOutput) -> list[Event]:
        """Take tokens up to a stop string, if one is completed by them; whatever follows it is to be discarded."""
        choice = self._choices[output.choice]
        for token in output.tokens:
            if choice.detokenizer.stop_string is not None:
                break
            choice.pending.append(token)
            if choice.detokenizer.push(token.token_id):
                self._client.finish(output.request_id, output.choice, choice.detokenizer.num_tokens)
        piece = choice.detokenizer.pull()
        tokens = [choice.pending.popleft() for _ in range(piece.num_tokens)]
        if not piece.text and not tokens:
            return []
        return [
            ChoiceDelta(
                output.choice, piece.text, tuple(token.token_id for token in tokens), self._logprobs(tokens)
            )
        ]

    def _last_delta(self, index: int, final: Final) -> ChoiceDelta:
        """Return what is left of a choice; a stop token belongs to its tokens, and to its text only if that was asked for."""
        choice = self._choices[index]
        stop_token = () if final.stop_token_id is None else (final.stop_token_id,)
        if self._include_stop and choice.detokenizer.stop_string is None:
            for token_id in stop_token:
                choice.detokenizer.push(token_id)
        return ChoiceDelta(
            index,
            choice.detokenizer.end().text,
            (*(token.token_id for token in choice.pending), *stop_token),
            self._logprobs(choice.pending),
            "stop" if final.reason is FinishReason.STOP else "length",
            self._stop_reason(choice, final),
            final,
        )

    def _stop_reason(self, choice: _Choice, final: Final) -> str | int | None:
        if choice.detokenizer.stop_string is not None:
            return choice.detokenizer.stop_string
        return None if final.stop_token_id in self._eos_token_ids else final.stop_token_id

    def _logprobs(self, tokens: Iterable[SampledToken]) -> tuple[TokenLogprob, ...]:
        if self._add.sampling.num_logprobs is None:
            return ()
        return tuple(self._token_logprob(token) for token in tokens)

    def _token_logprob(self, token: SampledToken) -> TokenLogprob:
        top = tuple(self._named_logprob(token_id, logprob) for token_id, logprob in token.top_logprobs)
        return self._named_logprob(token.token_id, token.logprob, top)

    def _named_logprob(
        self, token_id: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()
    ) -> TokenLogprob:
        return TokenLogprob(
            self._vocabulary.token_text(token_id),
            token_id,
            self._vocabulary.token_bytes(token_id),
            logprob,
            top,
        )

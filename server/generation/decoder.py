"""The engine's outputs of one request as events: tokens become text, and stop strings are found.

Knows tokens, text and stop strings; knows no HTTP and no queue.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from backends.interface import SampledToken
from scheduler.messages import AdmittedAdd, EngineOutput, Final, FinishReason
from server.generation.events import (
    Accepted,
    ChoiceDelta,
    Embedding,
    Event,
    GenerationError,
    Kept,
    Progress,
    PromptLogprobs,
)
from server.http.errors import invalid_value
from server.text.detokenizer import Detokenizer
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer
from server.text.stop_regex import StopRegex, StopRegexError
from server.text.stop_strings import StopString


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request's tokens become text.

    Some tokenizers drop a leading space at the start of a text. `continues_prompt` keeps it, as completions
    need it. `kept_token_ids` are special tokens whose text is part of the answer.
    """

    stop: tuple[str, ...] = ()
    stop_regexes: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    continues_prompt: bool = False
    kept_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Choice:
    """One choice's text so far, and the tokens whose text is not out yet."""

    detokenizer: Detokenizer
    pending: deque[SampledToken] = field(default_factory=deque)


class Decoder:
    """Decodes the outputs of one request.

    `finish(request_id, choice, num_tokens)` is called when a stop string ends a choice. The answer is its
    first `num_tokens` tokens. The engine discards the others.
    """

    def __init__(
        self,
        add: AdmittedAdd,
        renderer: Renderer,
        options: TextOptions,
        finish: Callable[[str, int, int], None],
    ) -> None:
        self._add = add
        self._vocabulary = renderer.vocabulary
        self._eos_token_ids = renderer.stop_token_ids
        self._includes_stop = options.include_stop_string
        self._finish = finish
        self._is_accepted = False
        self._num_computed = 0
        stop_strings = [StopString(text) for text in options.stop]
        self._choices = [
            _Choice(
                Detokenizer(
                    renderer.vocabulary,
                    stop_strings,
                    list(map(StopRegex, options.stop_regexes)),
                    include_stop_string=options.include_stop_string,
                    skip_special_tokens=options.skip_special_tokens,
                    kept_token_ids=options.kept_token_ids,
                    continues_text=options.continues_prompt,
                    min_tokens=add.stop.min_tokens,
                )
            )
            for _ in range(add.num_choices)
        ]

    def decode(self, output: EngineOutput) -> list[Event]:
        """Return an output's events. `Accepted` is the first of all.

        Raises `GenerationError` for a choice that ends in an error, and `ApiError` for an expression that
        proves too complex.
        """
        if output.final is not None and output.final.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise GenerationError(output.final)
        events: list[Event] = []
        if not self._is_accepted:
            self._is_accepted = True
            events.append(Accepted())
        if output.num_computed_prompt_tokens > self._num_computed:
            self._num_computed = output.num_computed_prompt_tokens
            events.append(Progress(self._num_computed))
        if output.prompt_logprobs:
            first = self._token_logprob(SampledToken(self._add.prompt_token_ids[0]))
            events.append(PromptLogprobs((first, *map(self._token_logprob, output.prompt_logprobs))))
        if output.kept is not None:
            prompt = self._add.prompt_token_ids[: output.kept.num_tokens]
            events.append(Kept(tuple(self._vocabulary.texts(prompt)), output.kept))
        if output.tokens:
            events += self._push(output)
        if output.embedding:
            events.append(Embedding(output.embedding))
        if output.final is not None and self._add.pooling is None:  # a pooled prompt has no answer
            events.append(self._last_delta(output.choice, output.final))
        return events

    def _push(self, output: EngineOutput) -> list[Event]:
        """Take tokens up to the first stop string; the engine discards what follows it."""
        choice = self._choices[output.choice]
        for token in output.tokens:
            if choice.detokenizer.stop_string is not None:
                break
            choice.pending.append(token)
            if self._ends_text(choice, token.token_id):
                self._finish(output.request_id, output.choice, choice.detokenizer.num_tokens)
        piece = choice.detokenizer.pull()
        tokens = [choice.pending.popleft() for _ in range(piece.num_tokens)]
        if not piece.text and not tokens:
            return []
        token_ids = tuple(token.token_id for token in tokens)
        return [ChoiceDelta(output.choice, piece.text, token_ids, self._logprobs(tokens))]

    def _ends_text(self, choice: _Choice, token_id: int) -> bool:
        try:
            return choice.detokenizer.push(token_id)
        except StopRegexError as error:
            raise invalid_value(f"'stop_regex' cannot be followed: {error}.", "stop_regex") from error

    def _last_delta(self, index: int, final: Final) -> ChoiceDelta:
        """Return what is left of a choice.

        A stop token belongs to the choice's tokens, and to its text only if that was requested.
        """
        choice = self._choices[index]
        stop_token = () if final.stop_token_id is None else (final.stop_token_id,)
        if self._includes_stop and choice.detokenizer.stop_string is None:
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
        likeliest = dict(token.top_logprobs)
        return replace(
            self._logprob(token.token_id, token.logprob),
            top=tuple(self._logprob(token_id, logprob) for token_id, logprob in token.top_logprobs),
            named=tuple(
                self._logprob(token_id, logprob)
                for token_id, logprob in token.named_logprobs
                if token_id not in likeliest
            ),
        )

    def _logprob(self, token_id: int, logprob: float | None) -> TokenLogprob:
        text = self._vocabulary.token_text(token_id)
        return TokenLogprob(text, token_id, self._vocabulary.token_bytes(token_id), logprob)

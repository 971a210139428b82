"""Text completions: a request's prompts, and its answer as a stream of chunks or as one body."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.interface import BackendSpec
from server.generation.choices import ChoiceEnd, Envelope, PromptFields, named_tokens, usage_of_chunk
from server.generation.events import ChoiceDelta, Event, Kept, PromptLogprobs
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Source, Task
from server.http.errors import ApiError
from server.http.streams import EventStream
from server.protocol.completions import CompletionChoice, CompletionLogprobs, CompletionRequest
from server.text.logprobs import MIN_LOGPROB, TokenLogprob, finite
from server.text.renderer import Renderer
from server.text.shortening import Passage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completion_task(request: CompletionRequest, model: str, spec: BackendSpec) -> Task:
    """Return the task of a text completion."""
    envelope = Envelope.new("cmpl-", model, "text_completion", "text_completion", request.request_id)
    limit = request.token_limit
    echoed_logprobs = request.num_logprobs if request.echo else None
    room = spec.max_model_len - (DEFAULT_MAX_TOKENS if limit is None else limit)
    requested = [count for count in (echoed_logprobs, request.prompt_logprobs) if count is not None]

    async def render(renderer: Renderer) -> Rendered:
        encoded = await _encode(request, renderer)
        prompts = tuple(request.truncated(token_ids, room) for token_ids in encoded)
        echoes = await _echoes(request, encoded, prompts, renderer) if request.echo else None
        question = [{"role": "user", "content": request.question}] if request.question else []
        return Rendered(
            prompts,
            body=lambda: CompletionBody(request, envelope, _Echo(echoes, PromptFields(request, prompts))),
            stream=lambda: CompletionStream(request, envelope, _Echo(echoes, PromptFields(request, prompts))),
            structure=request.structure,
            question=await renderer.encode_question(question),
            source=_source(request, renderer),
        )

    return Task(
        id=envelope.task_id,
        model=model,
        options=request,
        num_prompts=len(request.prompts),
        prompt_param="prompt",
        max_tokens=lambda room: min(room, DEFAULT_MAX_TOKENS) if limit is None else limit,
        render=render,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=max(requested, default=None),
        returns_kept_tokens=bool(request.return_kept_tokens),
        continues_prompt=True,
        truncates=request.truncate_prompt_tokens is not None,
    )


async def _encode(request: CompletionRequest, renderer: Renderer) -> list[tuple[int, ...]]:
    add_special_tokens = request.add_special_tokens is not False
    return [
        await renderer.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in request.prompts
    ]


def _source(request: CompletionRequest, renderer: Renderer) -> Source | None:
    """Return the text of the first prompt; None if it is given as token ids."""
    text = request.prompts[0]
    if not isinstance(text, str):
        return None
    question = request.question or text

    async def render(shorter: Sequence[str]) -> tuple[int, ...]:
        add_special_tokens = request.add_special_tokens is not False
        return await renderer.encode(shorter[0], add_special_tokens=add_special_tokens)

    return Source((Passage(text, may_be_cut=True, is_question=True),), question, render, is_chat=False)


async def _echoes(
    request: CompletionRequest,
    encoded: Sequence[tuple[int, ...]],
    truncated: Sequence[tuple[int, ...]],
    renderer: Renderer,
) -> tuple[str, ...]:
    """Return each prompt's text: as it came, unless it came as token ids or was truncated."""
    echoes = []
    for prompt, before, after in zip(request.prompts, encoded, truncated, strict=True):
        if isinstance(prompt, str) and after == before:
            echoes.append(prompt)
        else:
            echoes.append(await renderer.decode(after))
    return tuple(echoes)


@dataclass(slots=True)
class _Echo:
    """What choices begin with: their prompt's text and log-probabilities, if it is to be echoed."""

    texts: tuple[str, ...] | None  # None: nothing is echoed
    fields: PromptFields

    def of(self, prompt: int) -> tuple[str, tuple[TokenLogprob, ...], int]:
        """Return the text, its tokens, and how many of the first ones the text does not show, as a BOS."""
        if self.texts is None:
            return "", (), 0
        text, tokens = self.texts[prompt], self.fields.tokens.get(prompt, ())
        excess = sum(len(token.token) for token in tokens) - len(text)
        num_hidden = 0
        for token in tokens:
            excess -= len(token.token)
            if excess < 0 or text.startswith(token.token):
                break
            num_hidden += 1
        return text, tokens, num_hidden


@dataclass(slots=True)
class _Choice:
    """One choice, collected."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceEnd | None = None


class CompletionBody:
    """Collects the answer of a request that is not streamed."""

    def __init__(self, request: CompletionRequest, envelope: Envelope, echo: _Echo) -> None:
        self._request = request
        self._envelope = envelope
        self._echo = echo
        self._choices = [_Choice() for _ in range(len(request.prompts) * request.num_choices)]

    def add(self, prompt: int, event: Event, tally: Tally) -> None:
        if isinstance(event, PromptLogprobs | Kept):
            self._echo.fields.add(prompt, event)
        elif isinstance(event, ChoiceDelta):
            choice = self._choices[tally.choice_index(prompt, event)]
            choice.texts.append(event.text)
            choice.logprobs += event.logprobs
            choice.token_ids += event.token_ids
            choice.end = ChoiceEnd.of(event)

    async def body(self, tally: Tally) -> Payload:
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return self._envelope.body(choices, tally.usage())

    def _choice(self, index: int, choice: _Choice) -> CompletionChoice:
        end = choice.end
        assert end is not None, "a body is made once all of its choices have ended"
        prompt = index // self._request.num_choices
        text, logprobs, num_hidden = self._echo.of(prompt)
        whole: CompletionChoice = {
            "index": index,
            "text": text + "".join(choice.texts),
            "logprobs": _logprobs(self._request, (*logprobs, *choice.logprobs), 0, num_hidden),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            "matched_stop": end.matched_stop,
            "token_ids": choice.token_ids if self._request.return_token_ids else None,
            "prompt_token_ids": self._echo.fields.token_ids(prompt),
            "prompt_logprobs": self._echo.fields.logprobs(prompt),
        }
        if self._request.return_kept_tokens:
            whole["kept_tokens"] = self._echo.fields.kept_tokens(prompt)
        return whole


class CompletionStream:
    """Makes the chunks of a streamed answer."""

    stream_type = EventStream

    def __init__(self, request: CompletionRequest, envelope: Envelope, echo: _Echo) -> None:
        self._request = request
        self._envelope = envelope
        self._echo = echo
        self._offsets: dict[int, int] = {}  # by choice that has begun: characters of the tokens sent

    def opening(self) -> Sequence[Payload]:
        return ()

    def add(self, prompt: int, event: Event, tally: Tally) -> Sequence[Payload]:
        if isinstance(event, PromptLogprobs | Kept):
            self._echo.fields.add(prompt, event)
        if isinstance(event, Kept):
            kept = self._echo.fields.kept_tokens(prompt)
            return (self._envelope.chunk() | {"prompt": prompt, "kept_tokens": kept},)
        if not isinstance(event, ChoiceDelta):
            return ()
        usage = usage_of_chunk(self._request, tally)
        pieces = self._pieces(prompt, tally.choice_index(prompt, event), event)
        return [self._envelope.chunk(piece) | usage for piece in pieces]

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        if not self._request.includes_usage:
            return ()
        return (self._envelope.chunk() | {"usage": tally.usage()},)

    async def failure(self, error: ApiError, _: Tally) -> Sequence[Payload]:
        return (error.body(),)

    def _pieces(self, prompt: int, index: int, event: ChoiceDelta) -> list[CompletionChoice]:
        pieces = []
        if index not in self._offsets and self._request.echo:
            text, tokens, num_hidden = self._echo.of(prompt)
            pieces.append(self._piece(prompt, index, text, tokens, num_hidden=num_hidden))
        has_tokens = bool(event.token_ids and self._request.return_token_ids)
        if event.text or event.logprobs or event.final is not None or has_tokens:
            pieces.append(self._piece(prompt, index, event.text, event.logprobs, event.token_ids))
        end = ChoiceEnd.of(event)
        if end is not None:
            pieces[-1]["finish_reason"] = end.finish_reason
            pieces[-1]["stop_reason"] = end.stop_reason
            pieces[-1]["matched_stop"] = end.matched_stop
        return pieces

    def _piece(
        self,
        prompt: int,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprob],
        token_ids: tuple[int, ...] = (),
        num_hidden: int = 0,
    ) -> CompletionChoice:
        offset = self._offsets.get(index, 0)
        piece: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(self._request, tokens, offset, num_hidden),
            "finish_reason": None,
        }
        if self._request.return_token_ids:
            piece["token_ids"] = list(token_ids)
            if index not in self._offsets:
                piece["prompt_token_ids"] = self._echo.fields.token_ids(prompt)
        self._offsets[index] = offset + sum(len(token.token) for token in tokens[num_hidden:])
        return piece


def _logprobs(
    request: CompletionRequest, tokens: Sequence[TokenLogprob], offset: int, num_hidden: int
) -> CompletionLogprobs | None:
    """Return the parallel lists of these tokens, whose text begins at character `offset`. The first
    `num_hidden` add nothing to it.
    """
    num_top = request.num_logprobs
    if num_top is None:
        return None
    offsets = []
    for index, token in enumerate(tokens):
        offsets.append(offset)
        offset += len(token.token) if index >= num_hidden else 0
    named = named_tokens(request, tokens)
    return {
        "tokens": [token.token for token in named],
        "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in named],
        "top_logprobs": [_top_logprobs(token, num_top) for token in named],
        "text_offset": offsets,
    }


def _top_logprobs(token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    """Return the log-probabilities by text at a token's position, its own included.

    Of several tokens with the same text, the likeliest counts.
    """
    if token.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for other in (*token.top[:num_top], *token.named, token):
        likeliest[other.token] = max(finite(other.logprob), likeliest.get(other.token, MIN_LOGPROB))
    return likeliest

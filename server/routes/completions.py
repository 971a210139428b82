"""`POST /v1/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Response

from server.generation.answer import AnsweredChoice, ChoicesAnswer
from server.generation.checks import served_model
from server.generation.output import ChoiceDelta
from server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.routes.generation import GenerationResponse
from server.services import Services
from server.text.logprobs import TokenLogprob, finite
from server.text.renderer import Renderer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=Completion)
    async def create_completion(body: CompletionRequest) -> Response:
        return GenerationResponse(
            services, CompletionAnswer(body, served_model(body.model, services.settings))
        )

    return routes


class CompletionAnswer(ChoicesAnswer):
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    prompt_param = "prompt"

    def __init__(self, request: CompletionRequest, model: str) -> None:
        super().__init__(request, model)
        self._request = request
        self._prompts = request.prompts
        self._prompt_texts: list[str] = []
        self._offsets: dict[
            int, int
        ] = {}  # of choices that have begun to be streamed: characters of the tokens sent

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self._request.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = (self._request.logprobs if self._request.echo else None, self._request.prompt_logprobs)
        return max((number for number in asked if number is not None), default=None)

    @property
    def continues_prompt(self) -> bool:
        return True

    async def _render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        add_special_tokens = self._request.add_special_tokens is not False
        rendered = [
            await renderer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in self._prompts
        ]
        if self._request.echo:
            self._prompt_texts = [
                given
                if isinstance(given, str) and self._request.truncated(ids) == ids
                else await renderer.decode(self._request.truncated(ids))
                for given, ids in zip(self._prompts, rendered, strict=True)
            ]
        return tuple(rendered)

    def max_tokens(self, room: int) -> int:
        limit = self._request.max_tokens
        return min(room, DEFAULT_MAX_TOKENS) if limit is None else limit

    def choice(self, index: int, choice: AnsweredChoice) -> CompletionChoice:
        text, logprobs = self._echo(index)
        prompt = index // self._request.num_choices
        return {
            "index": index,
            "text": text + choice.text,
            "logprobs": self._logprobs((*logprobs, *choice.logprobs), 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "matched_stop": choice.matched_stop,
            "token_ids": choice.token_ids if self.returns_token_ids else None,
            "prompt_token_ids": self.prompt_token_ids(prompt),
            "prompt_logprobs": self.prompt_logprobs(prompt),
        }

    def chunk_choices(self, index: int, delta: ChoiceDelta) -> list[CompletionChoice]:
        pieces = []
        if index not in self._offsets and self._request.echo:
            pieces.append(self._piece(index, *self._echo(index)))
        if (
            delta.text
            or delta.logprobs
            or delta.final is not None
            or (delta.token_ids and self.returns_token_ids)
        ):
            pieces.append(self._piece(index, delta.text, delta.logprobs, delta.token_ids))
        if delta.final is not None:
            pieces[-1]["finish_reason"] = delta.finish_reason
            pieces[-1]["stop_reason"], pieces[-1]["matched_stop"] = delta.stop_reason, delta.matched_stop
        return pieces

    def _piece(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], token_ids: tuple[int, ...] = ()
    ) -> CompletionChoice:
        offset = self._offsets.get(index, 0)
        piece: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens, offset),
            "finish_reason": None,
        }
        if self.returns_token_ids:
            piece["token_ids"] = list(token_ids)
            if index not in self._offsets:
                piece["prompt_token_ids"] = self.prompt_token_ids(index // self._request.num_choices)
        self._offsets[index] = offset + sum(len(token.token) for token in tokens)
        return piece

    def _echo(self, index: int) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Return what a choice's text begins with: its prompt, if it is to be echoed."""
        if not self._request.echo:
            return "", ()
        prompt = index // self._request.num_choices
        return self._prompt_texts[prompt], self._prompt_logprobs.get(prompt, ())

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
        """Return the parallel lists of these tokens, whose text begins at `offset`."""
        num_top = self.num_logprobs
        if num_top is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        named = self.named(tokens)
        return {
            "tokens": [token.token for token in named],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in named],
            "top_logprobs": [_top_logprobs(token, num_top) for token in named],
            "text_offset": offsets,
        }


def _top_logprobs(token: TokenLogprob, num_top: int) -> dict[str, float] | None:
    """Return the likeliest texts at a token's place, and its own; of tokens with the same text the likeliest counts."""
    if token.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for other in (*token.top[:num_top], token):
        likeliest.setdefault(other.token, finite(other.logprob))
    return likeliest

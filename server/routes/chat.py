"""`POST /v1/chat/completions`."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Response

from server.admission import served_model
from server.answer import Answer, AnsweredChoice
from server.errors import invalid_value
from server.logprobs import finite
from server.output import ChoiceDelta, TokenLogprob
from server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    TopLogprob,
)
from server.renderer import Renderer
from server.routes.generation import GenerationResponse
from server.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        model = served_model(body.model, services.settings)
        limit = services.settings.limits.max_messages
        if len(body.messages) > limit:
            raise invalid_value(f"'messages' is limited to {limit} by this server, got {len(body.messages)}.", "messages")
        return GenerationResponse(services, ChatAnswer(body, model))

    return routes


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, request: ChatCompletionRequest, model: str) -> None:
        super().__init__(request, model)
        self._request = request
        self._begun: set[int] = set()  # choices whose role was sent

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        return self._request.num_logprobs

    @property
    def continues_prompt(self) -> bool:
        return bool(self._request.continue_final_message)

    async def render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        prompt = await renderer.render_chat(
            [message.plain() for message in self._request.messages],
            add_generation_prompt=self._request.adds_generation_prompt,
            continue_final_message=bool(self._request.continue_final_message),
        )
        return (prompt,)

    def max_tokens(self, room: int) -> int:
        limit = self._request.token_limit
        return room if limit is None else limit

    def choice(self, index: int, choice: AnsweredChoice) -> ChatChoice:
        assert choice.finish_reason is not None, "an answer has a body once all of its choices have ended"
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def chunk_choices(self, index: int, delta: ChoiceDelta) -> Iterator[ChatChunkChoice]:
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})
        if delta.text or delta.logprobs:
            yield _chunk_choice(index, {"content": delta.text}) | {"logprobs": self._logprobs(delta.logprobs)}
        if delta.final is not None:
            yield _chunk_choice(index, {}) | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self.num_logprobs is None:
            return None
        return {"content": [_token_logprob(token) for token in tokens], "refusal": None}


def _chunk_choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.bytes)}


def _token_logprob(token: TokenLogprob) -> ChatTokenLogprob:
    return {**_top_logprob(token), "top_logprobs": [_top_logprob(other) for other in token.top]}

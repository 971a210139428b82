"""`POST /v1/chat/completions`."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Response

from server.admission import served_model
from server.answer import Answer, AnsweredChoice
from server.conversation import Conversation
from server.errors import invalid_value
from server.logprobs import finite
from server.message_reader import MessageReader
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
from server.protocol.usage import Usage
from server.renderer import Renderer
from server.routes.generation import GenerationResponse
from server.services import Services
from server.settings import ServerSettings
from server.structure import Structure


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion)
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        model = served_model(body.model, services.settings)
        limits = services.settings.limits
        for param, number, limit in (
            ("messages", len(body.messages), limits.max_messages),
            ("tools", len(body.tools or ()), limits.max_tools),
        ):
            if number > limit:
                raise invalid_value(f"'{param}' is limited to {limit} by this server, got {number}.", param)
        return GenerationResponse(services, ChatAnswer(body, model, services.settings))

    return routes


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, request: ChatCompletionRequest, model: str, settings: ServerSettings) -> None:
        super().__init__(request, model)
        self._request = request
        self._settings = settings
        self._conversation: Conversation | None = None
        self._readers: dict[int, MessageReader] = {}  # of choices whose role was sent

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
        self._conversation = Conversation(self._request, renderer, self._settings)
        return (await self._conversation.render(),)

    @property
    def kept_token_ids(self) -> frozenset[int]:
        return self._begun.kept_token_ids

    @property
    def structure(self) -> Structure | None:
        return self._begun.structure

    def max_tokens(self, room: int) -> int:
        limit = self._request.token_limit
        return room if limit is None else limit

    def body(self, choices: list[AnsweredChoice], counts: Usage) -> dict[str, object]:
        prompt_logprobs = self.prompt_logprobs(0)
        return super().body(choices, counts) | ({} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs})

    def choice(self, index: int, choice: AnsweredChoice) -> ChatChoice:
        assert choice.finish_reason is not None, "an answer has a body once all of its choices have ended"
        reader = MessageReader(self._begun.reader(), self._begun.new_call_id)
        reader.read(choice.text, is_end=True)
        return {
            "index": index,
            "message": reader.message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._begun.finish_reason(choice.finish_reason, reader.num_calls),
            "stop_reason": choice.stop_reason,
        }

    def chunk_choices(self, index: int, delta: ChoiceDelta) -> Iterator[ChatChunkChoice]:
        if index not in self._readers:
            self._readers[index] = MessageReader(self._begun.reader(), self._begun.new_call_id)
            yield _chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})
        reader = self._readers[index]
        deltas = reader.read(delta.text, is_end=delta.final is not None)
        if delta.logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs = self._logprobs(delta.logprobs)
        for number, piece in enumerate(deltas):
            yield _chunk_choice(index, piece) | {"logprobs": logprobs if number == 0 else None}
        if delta.final is not None and delta.finish_reason is not None:
            finish_reason = self._begun.finish_reason(delta.finish_reason, reader.num_calls)
            yield _chunk_choice(index, {}) | {"finish_reason": finish_reason, "stop_reason": delta.stop_reason}

    @property
    def _begun(self) -> Conversation:
        assert self._conversation is not None, "an answer is asked for once its prompt is rendered"
        return self._conversation

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

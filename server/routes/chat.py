"""`POST /v1/chat/completions`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastapi import APIRouter, Response

from server.generation.answer import AnsweredChoice, ChoicesAnswer, Tally
from server.generation.checks import served_model
from server.generation.conversation import Conversation, TurnRequest
from server.generation.message_reader import MessageReader
from server.generation.output import ChoiceDelta
from server.generation.token_logprobs import token_logprob
from server.grammar.structure import Structure
from server.http.errors import invalid_value
from server.options.settings import ServerSettings
from server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from server.routes.generation import GenerationResponse
from server.services import Services
from server.text.logprobs import TokenLogprob
from server.text.renderer import Renderer


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


class ChatAnswer(ChoicesAnswer):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_param = "messages"

    def __init__(self, request: ChatCompletionRequest, model: str, settings: ServerSettings) -> None:
        super().__init__(request, model)
        self._request = request
        self._settings = settings
        self._conversation: Conversation | None = None
        self._readers: dict[int, MessageReader] = {}  # of choices that have begun

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        return self._request.num_logprobs

    @property
    def continues_prompt(self) -> bool:
        return bool(self._request.continue_final_message)

    async def _render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        self._conversation = Conversation(_turn_request(self._request), renderer, self._settings)
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

    def body(self, tally: Tally) -> dict[str, object]:
        return super().body(tally) | {
            "prompt_logprobs": self.prompt_logprobs(0),
            "prompt_token_ids": self.prompt_token_ids(0),
        }

    def choice(self, index: int, choice: AnsweredChoice) -> ChatChoice:
        assert choice.finish_reason is not None, "an answer has a body once all of its choices have ended"
        reader = self._readers[index]
        message = reader.message
        if self._request.echoed:
            message["content"] = self._request.echoed + (message["content"] or "")
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice.finish_reason, reader),
            "stop_reason": choice.stop_reason,
            "matched_stop": choice.matched_stop,
            "token_ids": choice.token_ids if self.returns_token_ids else None,
        }

    def read(self, index: int, delta: ChoiceDelta, tally: Tally) -> Iterable[Mapping[str, object]]:
        is_first = not self._readers
        chunks = super().read(index, delta, tally)
        tally.choices[index].num_reasoning_tokens = self._readers[index].num_reasoning_tokens
        return self._with_prompt(chunks) if is_first and self.returns_token_ids else chunks

    def _with_prompt(self, chunks: Iterable[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
        """Return a stream's first chunks, of which the very first tells the prompt."""
        for number, chunk in enumerate(chunks):
            yield {**chunk, "prompt_token_ids": self.prompt_token_ids(0)} if number == 0 else chunk

    def chunk_choices(self, index: int, delta: ChoiceDelta) -> Iterable[ChatChunkChoice]:
        is_first = index not in self._readers
        if is_first:
            self._readers[index] = MessageReader(self._begun.reader(), self._begun.new_call_id)
        deltas = self._readers[index].read(delta)
        if not deltas and (delta.logprobs or (delta.token_ids and self.returns_token_ids)):
            deltas = [{"content": ""}]
        return self._chunk_choices(index, delta, deltas, is_first=is_first)

    def _chunk_choices(
        self, index: int, delta: ChoiceDelta, deltas: list[ChatDelta], *, is_first: bool
    ) -> Iterator[ChatChunkChoice]:
        if is_first:
            yield _chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})
            if self._request.echoed:
                yield _chunk_choice(index, {"content": self._request.echoed})
        logprobs = self._logprobs(delta.logprobs)
        for number, piece in enumerate(deltas):
            choice = _chunk_choice(index, piece) | {"logprobs": logprobs if number == 0 else None}
            yield (
                choice | {"token_ids": list(delta.token_ids)}
                if number == 0 and self.returns_token_ids
                else choice
            )
        if delta.final is not None and delta.finish_reason is not None:
            finish_reason = self._finish_reason(delta.finish_reason, self._readers[index])
            yield _chunk_choice(index, {}) | {
                "finish_reason": finish_reason,
                "stop_reason": delta.stop_reason,
                "matched_stop": delta.matched_stop,
            }

    def _finish_reason(self, reason: str, reader: MessageReader) -> str:
        """Return why a choice ended, as OpenAI tells it: a named call's end is a stop."""
        return (
            "tool_calls"
            if reason == "stop" and reader.num_calls and not self._request.tool_use.choice.is_named
            else reason
        )

    @property
    def _begun(self) -> Conversation:
        assert self._conversation is not None, "an answer is asked for once its prompt is rendered"
        return self._conversation

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self.num_logprobs is None:
            return None
        return {"content": [token_logprob(token) for token in self.named(tokens)], "refusal": None}


def _turn_request(request: ChatCompletionRequest) -> TurnRequest:
    return TurnRequest(
        messages=[message.plain() for message in request.messages],
        tools=request.tool_use,
        structure=request.structure,
        effort=request.reasoning_effort,
        template_options=request.template_options,
        adds_generation_prompt=request.adds_generation_prompt,
        continues_final_message=bool(request.continue_final_message),
    )


def _chunk_choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

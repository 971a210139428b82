"""Ollama's chats, generations and embeddings: prompts of requests, and answers as lines of JSON or whole."""

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

from backends.interface import BackendSpec
from scheduler.messages import Timing
from server.generation.choice_reader import ChoiceReader
from server.generation.embeddings import EmbeddingBody, embedding_task
from server.generation.events import ChoiceDelta, Event
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Task
from server.generation.turn import ChatFormat, Turn, TurnRequest, call_arguments, render_turn
from server.http.error_shapes import ollama_error
from server.http.errors import ApiError
from server.http.streams import LineStream
from server.options.settings import ServerSettings
from server.parsers.answer_reader import AnswerReader
from server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.protocol.ollama import (
    AnswerCall,
    EmbedRequest,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbeddings,
    OllamaGenerateRequest,
)
from server.text.renderer import Renderer

Request: TypeAlias = OllamaChatRequest | OllamaGenerateRequest


def ollama_task(request: Request, model: str, settings: ServerSettings) -> Task:
    """Return the task of a chat or a generation. Its limit of tokens shrinks to the room that there is."""
    limit = request.token_limit
    is_raw = isinstance(request, OllamaGenerateRequest) and bool(request.raw)

    async def render(renderer: Renderer) -> Rendered:
        if isinstance(request, OllamaGenerateRequest) and request.raw:
            prompt = await renderer.encode(request.prompt or "", add_special_tokens=True)
            reader = ChoiceReader(AnswerReader(None, None), renderer.vocabulary)
            reply = _Reply(request, model, reader, None)
            return Rendered(
                (prompt,),
                body=lambda: OllamaBody(reply),
                stream=lambda: OllamaLines(reply),
                structure=request.structure,
            )
        turn = await render_turn(_turn_request(request, renderer, settings), renderer, settings)
        reply = _Reply(request, model, turn.reader(), turn)
        return Rendered(
            (turn.prompt,),
            body=lambda: OllamaBody(reply),
            stream=lambda: OllamaLines(reply),
            structure=turn.structure,
            thinking=turn.thinking,
            kept_token_ids=turn.kept_token_ids,
            question=turn.question,
            source=turn.source,
        )

    return Task(
        id=f"ollama-{uuid.uuid4().hex}",
        model=model,
        options=request,
        num_prompts=1,
        prompt_param="messages" if isinstance(request, OllamaChatRequest) else "prompt",
        max_tokens=lambda room: room if limit is None else max(limit, 1),
        shrinks_to_room=True,
        render=render,
        continues_prompt=is_raw,
    )


def _turn_request(request: Request, renderer: Renderer, settings: ServerSettings) -> TurnRequest:
    chat_format = ChatFormat.of(renderer.info.chat_template or "", settings)
    return TurnRequest(
        request.turns(),
        request.tool_use,
        request.structure,
        effort=request.effort if chat_format.uses("reasoning_effort") else None,
        effort_param="think",
        template_options=chat_format.thinking_options(request.wants_thinking),
    )


class _Reply:
    """One answer: its pieces as members of `message`, or beside `response`."""

    def __init__(self, request: Request, model: str, reader: ChoiceReader, turn: Turn | None) -> None:
        self._is_chat = isinstance(request, OllamaChatRequest)
        self._model = model
        self._reader = reader
        self._turn = turn
        self._call: tuple[str, list[str]] | None = None  # the unfinished call's name and arguments
        self._end: ChoiceDelta | None = None

    def read(self, event: Event) -> list[Part | AnswerCall]:
        """Read an event. A call is returned once it is complete."""
        if not isinstance(event, ChoiceDelta):
            return []
        pieces: list[Part | AnswerCall] = []
        for part in self._reader.read(event):
            match part:
                case CallStart(name):
                    pieces += self._end_call()
                    self._call = (name, [])
                case CallArguments(text):
                    assert self._call is not None, "arguments follow the name of their call"
                    self._call[1].append(text)
                case _:
                    pieces += [*self._end_call(), part]
        if event.final is not None:
            self._end = event
            pieces += self._end_call()
        return pieces

    def answer(self, pieces: Sequence[Part | AnswerCall]) -> OllamaAnswer:
        """Return a line with these pieces."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        thinking = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [piece for piece in pieces if isinstance(piece, dict)]
        answer = _answer(self._model, text, is_chat=self._is_chat)
        if thinking and "message" in answer:
            answer["message"]["thinking"] = thinking
        elif thinking:
            answer["thinking"] = thinking
        if calls and "message" in answer:
            answer["message"]["tool_calls"] = calls
        return answer

    def ended(self, pieces: Sequence[Part | AnswerCall], tally: Tally) -> OllamaAnswer:
        """Return the last line, or the whole answer."""
        assert self._end is not None, "the answer has ended"
        assert self._end.final is not None
        answer = self.answer(pieces)
        answer["done"] = True
        answer["done_reason"] = self._end.finish_reason or "stop"
        answer["prompt_eval_count"] = sum(tally.num_prompt_tokens)
        answer["eval_count"] = tally.num_output_tokens
        _add_times(answer, self._end.final.timing)
        return answer

    def _end_call(self) -> list[AnswerCall]:
        if self._call is None:
            return []
        assert self._turn is not None, "a raw prompt's answer has no calls"
        name, texts = self._call
        self._call = None
        arguments = call_arguments("".join(texts))
        return [{"id": self._turn.new_call_id(name), "function": {"name": name, "arguments": arguments}}]


def embed_task(body: EmbedRequest, model: str, settings: ServerSettings, spec: BackendSpec) -> Task:
    """Return the task of embeddings. Raises `ApiError`."""
    start = time.monotonic()

    class Body(EmbeddingBody):
        async def body(self, tally: Tally) -> Payload:
            answer: OllamaEmbeddings = {
                "model": model,
                "embeddings": self.vectors(),
                "total_duration": _nanoseconds(time.monotonic() - start),
                "load_duration": 0,
                "prompt_eval_count": sum(tally.num_prompt_tokens),
            }
            return answer

    return embedding_task(body.plain(), model, settings, spec, Body)


class OllamaBody:
    """Collects an answer that is not streamed."""

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply
        self._pieces: list[Part | AnswerCall] = []

    def add(self, _: int, event: Event, __: Tally) -> None:
        self._pieces += self._reply.read(event)

    async def body(self, tally: Tally) -> Payload:
        return self._reply.ended(self._pieces, tally)


class OllamaLines:
    """Makes the lines of a streamed answer."""

    stream_type = LineStream

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply

    def opening(self) -> Sequence[Payload]:
        return ()

    def add(self, _: int, event: Event, __: Tally) -> Sequence[Payload]:
        pieces = self._reply.read(event)
        return (self._reply.answer(pieces),) if pieces else ()

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        return (self._reply.ended((), tally),)

    async def failure(self, error: ApiError, _: Tally) -> Sequence[Payload]:
        return (ollama_error(error),)


def loaded(request: Request, model: str) -> Mapping[str, object]:
    """Return the answer to a request without a prompt."""
    answer = _answer(model, "", is_chat=isinstance(request, OllamaChatRequest))
    return {**answer, "done": True, "done_reason": "load"}


def _answer(model: str, text: str, *, is_chat: bool) -> OllamaAnswer:
    now = datetime.now(UTC).isoformat()
    if is_chat:
        message = {"role": "assistant", "content": text}
        return {"model": model, "created_at": now, "done": False, "message": message}  # type: ignore[typeddict-item]
    return {"model": model, "created_at": now, "done": False, "response": text}


def _add_times(answer: OllamaAnswer, timing: Timing) -> None:
    admitted = timing.arrival if timing.admitted is None else timing.admitted
    first = admitted if timing.first_token is None else timing.first_token
    answer["total_duration"] = _nanoseconds(timing.finished - timing.arrival)
    answer["load_duration"] = 0
    answer["prompt_eval_duration"] = _nanoseconds(first - admitted)
    answer["eval_duration"] = _nanoseconds(timing.finished - first)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

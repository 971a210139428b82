"""Chat completions: a request's prompt, and its answer as a stream of chunks or as one body."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from backends.interface import BackendSpec
from server.generation.admission import prompt_too_long
from server.generation.choice_reader import ChoiceReader
from server.generation.choices import (
    ChoiceEnd,
    Envelope,
    PromptFields,
    chat_token_logprob,
    named_tokens,
    usage_of_chunk,
)
from server.generation.events import ChoiceDelta, Event, Kept, PromptLogprobs
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Task
from server.generation.turn import Turn, TurnRequest, render_turn
from server.http.errors import ApiError
from server.http.streams import EventStream
from server.options.settings import ServerSettings
from server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    MessageToolCall,
)
from server.text.logprobs import TokenLogprob
from server.text.renderer import PromptTooLongError, Renderer


def chat_task(
    request: ChatCompletionRequest, model: str, settings: ServerSettings, spec: BackendSpec
) -> Task:
    """Return the task of a chat completion."""
    envelope = Envelope.new(
        "chatcmpl-", model, "chat.completion", "chat.completion.chunk", request.request_id
    )
    limit = request.token_limit

    async def render(renderer: Renderer) -> Rendered:
        turn = await render_turn(_turn_request(request), renderer, settings)
        prompt = turn.prompt
        if request.add_special_tokens:
            prompt = await renderer.with_special_tokens(prompt)
        prompts = (request.truncated(prompt, spec.max_model_len - (limit or 1)),)
        return Rendered(
            prompts,
            body=lambda: ChatBody(request, turn, envelope, PromptFields(request, prompts)),
            stream=lambda: ChatStream(request, turn, envelope, PromptFields(request, prompts)),
            structure=turn.structure,
            thinking=turn.thinking,
            kept_token_ids=turn.kept_token_ids,
            question=turn.question if request.num_prefill_tokens is None else None,
            prediction=await _prediction(request, renderer, spec),
            source=None if request.add_special_tokens else turn.source,
        )

    return Task(
        id=envelope.task_id,
        model=model,
        options=request,
        num_prompts=1,
        prompt_param="messages",
        max_tokens=lambda room: room if limit is None else limit,
        render=render,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        returns_kept_tokens=bool(request.return_kept_tokens),
        continues_prompt=bool(request.continue_final_message),
        truncates=request.truncate_prompt_tokens is not None,
    )


async def _prediction(
    request: ChatCompletionRequest, renderer: Renderer, spec: BackendSpec
) -> tuple[int, ...]:
    """Return the tokens of the request's prediction. Raises `ApiError` for one that is no answer's length."""
    if request.prediction is None:
        return ()
    try:
        token_ids = await renderer.encode(request.prediction.text, add_special_tokens=False)
    except PromptTooLongError as error:
        raise prompt_too_long(error.num_chars, spec, "prediction") from error
    return token_ids


def _turn_request(request: ChatCompletionRequest) -> TurnRequest:
    return TurnRequest(
        messages=[message.plain() for message in request.messages],
        tools=request.tool_use,
        structure=request.structure,
        effort=request.effort,
        effort_param=request.effort_param,
        wants_thinking=request.wants_thinking,
        thinking_param=request.thinking_param,
        verbosity=request.verbosity,
        template_options=request.template_options,
        adds_generation_prompt=request.adds_generation_prompt,
        continues_final_message=bool(request.continue_final_message),
    )


@dataclass(slots=True)
class _Message:
    """One choice's answer, collected."""

    reader: ChoiceReader
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # ids, names and arguments
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceEnd | None = None


class ChatBody:
    """Collects the answer of a request that is not streamed."""

    def __init__(
        self, request: ChatCompletionRequest, turn: Turn, envelope: Envelope, prompt_fields: PromptFields
    ) -> None:
        self._request = request
        self._turn = turn
        self._envelope = envelope
        self._prompt_fields = prompt_fields
        self._messages = [_Message(turn.reader()) for _ in range(request.num_choices)]

    def add(self, prompt: int, event: Event, _: Tally) -> None:
        if isinstance(event, PromptLogprobs | Kept):
            self._prompt_fields.add(prompt, event)
        elif isinstance(event, ChoiceDelta):
            message = self._messages[event.choice]
            for part in message.reader.read(event):
                self._collect(message, part)
            message.logprobs += event.logprobs
            message.token_ids += event.token_ids
            message.end = ChoiceEnd.of(event)

    async def body(self, tally: Tally) -> Payload:
        num_reasoning_tokens = sum(message.reader.num_reasoning_tokens for message in self._messages)
        choices = [self._choice(index, message) for index, message in enumerate(self._messages)]
        body = self._envelope.body(choices, tally.usage(num_reasoning_tokens)) | {
            "prompt_logprobs": self._prompt_fields.logprobs(0),
            "prompt_token_ids": self._prompt_fields.token_ids(0),
        }
        if self._request.return_kept_tokens:
            body["kept_tokens"] = self._prompt_fields.kept_tokens(0)
        return body

    def _collect(self, message: _Message, part: Part) -> None:
        match part:
            case Content(text):
                message.content.append(text)
            case Reasoning(text) if self._request.shows_reasoning:
                message.reasoning.append(text)
            case CallStart(name):
                message.calls.append((self._turn.new_call_id(name), name, []))
            case CallArguments(text):
                message.calls[-1][2].append(text)

    def _choice(self, index: int, message: _Message) -> ChatChoice:
        end = message.end
        assert end is not None, "a body is made once all of its choices have ended"
        return {
            "index": index,
            "message": self._message(message),
            "logprobs": _logprobs(self._request, message.logprobs),
            "finish_reason": _finish_reason(self._request, end, has_calls=bool(message.calls)),
            "stop_reason": end.stop_reason,
            "matched_stop": end.matched_stop,
            "token_ids": message.token_ids if self._request.return_token_ids else None,
        }

    def _message(self, message: _Message) -> AnswerMessage:
        content = "".join(message.content)
        has_content = bool(content or self._request.echoed or not message.calls)
        whole: AnswerMessage = {
            "role": "assistant",
            "content": self._request.echoed + content if has_content else None,
            "refusal": None,
        }
        if message.reasoning:
            whole["reasoning"] = whole["reasoning_content"] = "".join(message.reasoning)
        if message.calls:
            whole["tool_calls"] = [_call(*call) for call in message.calls]
        return whole


@dataclass(slots=True)
class _StreamedChoice:
    """One choice of a stream: only what its next chunk needs."""

    reader: ChoiceReader
    num_calls: int = 0
    has_begun: bool = False


class ChatStream:
    """Makes the chunks of a streamed answer."""

    stream_type = EventStream

    def __init__(
        self, request: ChatCompletionRequest, turn: Turn, envelope: Envelope, prompt_fields: PromptFields
    ) -> None:
        self._request = request
        self._turn = turn
        self._envelope = envelope
        self._prompt_fields = prompt_fields
        self._choices = [_StreamedChoice(turn.reader()) for _ in range(request.num_choices)]
        self._has_begun = False

    def opening(self) -> Sequence[Payload]:
        return ()

    def add(self, prompt: int, event: Event, tally: Tally) -> Sequence[Payload]:
        if isinstance(event, Kept):
            self._prompt_fields.add(prompt, event)
            return (self._envelope.chunk() | {"kept_tokens": self._prompt_fields.kept_tokens(prompt)},)
        if not isinstance(event, ChoiceDelta):
            return ()
        choice = self._choices[event.choice]
        # The reader goes first: it decides which tokens are reasoning, and usage counts them.
        pieces = list(self._pieces(event, choice))
        usage = usage_of_chunk(self._request, tally, self._num_reasoning_tokens)
        chunks = [self._envelope.chunk(piece) | usage for piece in pieces]
        if chunks and not self._has_begun:
            self._has_begun = True
            if self._request.return_token_ids:
                chunks[0]["prompt_token_ids"] = self._prompt_fields.token_ids(prompt)
        return chunks

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        if not self._request.includes_usage:
            return ()
        return (self._envelope.chunk() | {"usage": tally.usage(self._num_reasoning_tokens)},)

    async def failure(self, error: ApiError, _: Tally) -> Sequence[Payload]:
        return (error.body(),)

    @property
    def _num_reasoning_tokens(self) -> int:
        return sum(choice.reader.num_reasoning_tokens for choice in self._choices)

    def _pieces(self, event: ChoiceDelta, choice: _StreamedChoice) -> Iterator[ChatChunkChoice]:
        parts = choice.reader.read(event)
        if not self._request.shows_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        deltas = [self._delta(part, choice) for part in parts]
        returns_token_ids = bool(self._request.return_token_ids)
        if not deltas and (event.logprobs or (event.token_ids and returns_token_ids)):
            deltas = [{"content": ""}]
        if not choice.has_begun:
            choice.has_begun = True
            yield _chunk_choice(event.choice, {"role": "assistant", "content": "", "refusal": None})
            if self._request.echoed:
                yield _chunk_choice(event.choice, {"content": self._request.echoed})
        for index, delta in enumerate(deltas):
            piece = _chunk_choice(event.choice, delta)
            if index == 0:
                piece["logprobs"] = _logprobs(self._request, event.logprobs)
                if returns_token_ids:
                    piece["token_ids"] = list(event.token_ids)
            yield piece
        end = ChoiceEnd.of(event)
        if end is not None:
            last = _chunk_choice(event.choice, {})
            last["finish_reason"] = _finish_reason(self._request, end, has_calls=choice.num_calls > 0)
            last["stop_reason"] = end.stop_reason
            last["matched_stop"] = end.matched_stop
            yield last

    def _delta(self, part: Part, choice: _StreamedChoice) -> ChatDelta:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallStart(name):
                choice.num_calls += 1
                function: FunctionDelta = {"name": name, "arguments": ""}
                index = choice.num_calls - 1
                call_id = self._turn.new_call_id(name)
                return {
                    "tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]
                }
            case CallArguments(text):
                index = choice.num_calls - 1
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(call_id: str, name: str, arguments: list[str]) -> MessageToolCall:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": "".join(arguments)},
    }


def _chunk_choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(request: ChatCompletionRequest, end: ChoiceEnd, *, has_calls: bool) -> str:
    """Return why a choice ended in OpenAI's words: the end of a named call is a stop."""
    if end.finish_reason == "stop" and has_calls and not request.tool_use.choice.is_named:
        return "tool_calls"
    return end.finish_reason


def _logprobs(request: ChatCompletionRequest, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    if request.num_logprobs is None:
        return None
    return {
        "content": [chat_token_logprob(token) for token in named_tokens(request, tokens)],
        "refusal": None,
    }

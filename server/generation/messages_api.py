"""Anthropic's messages: a request's prompt, and its answer as blocks, whole or as the events of a stream."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from server.generation.choice_reader import ChoiceReader
from server.generation.events import ChoiceDelta, Event
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Task
from server.generation.turn import ChatFormat, Turn, TurnRequest, call_arguments, render_turn
from server.http.error_shapes import anthropic_error
from server.http.errors import ApiError
from server.http.ignored import ignore
from server.http.streams import PingedEventStream
from server.options.settings import ServerSettings
from server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.protocol.message_blocks import UNSIGNED, hidden
from server.protocol.messages_api import Content as BlockContent
from server.protocol.messages_api import (
    MessageFields,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    StopReason,
)
from server.protocol.usage import Usage
from server.text.renderer import Renderer

StreamEvent: TypeAlias = dict[str, Any]


def message_task(request: MessagesRequest, model: str, settings: ServerSettings) -> Task:
    """Return the task of a message. Its limit of tokens shrinks to the room that the prompt leaves."""
    message_id = f"msg_{uuid.uuid4().hex}"

    async def render(renderer: Renderer) -> Rendered:
        turn = await render_message(request, renderer, settings)

        def answer() -> MessageAnswer:
            return MessageAnswer(message_id, model, request, turn)

        return Rendered(
            (turn.prompt,),
            body=lambda: MessageBody(answer()),
            stream=lambda: MessageStream(answer()),
            structure=turn.structure,
            thinking=turn.thinking,
            kept_token_ids=turn.kept_token_ids,
            question=turn.question,
            source=turn.source,
        )

    return Task(
        id=message_id,
        model=model,
        options=request,
        num_prompts=1,
        prompt_param="messages",
        max_tokens=lambda _: request.max_tokens,
        shrinks_to_room=True,
        render=render,
        continues_prompt=_continues(request.turns),
    )


async def render_message(request: MessageFields, renderer: Renderer, settings: ServerSettings) -> Turn:
    """Render a request's prompt. Raises `RenderError` and `ApiError`."""
    turns = request.turns
    continues = _continues(turns)
    chat_format = ChatFormat.of(renderer.info.chat_template or "", settings)
    has_efforts = chat_format.uses("reasoning_effort")
    if request.effort is not None and not has_efforts:
        ignore("output_config.effort")
    turn = TurnRequest(
        turns,
        request.tool_use,
        request.structure,
        # An effort alone does not switch reasoning on.
        effort=request.effort if has_efforts else None,
        effort_param="output_config.effort",
        template_options=chat_format.thinking_options(request.wants_thinking),
        adds_generation_prompt=not continues,
        continues_final_message=continues,
    )
    return await render_turn(turn, renderer, settings)


def _continues(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the answer goes on where the last turn ends: an assistant's text."""
    last = turns[-1] if turns else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last


class _Text:
    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def start(self) -> BlockContent:
        return {"type": "text", "text": "", "citations": None}

    def more(self, text: str) -> list[Payload]:
        self._texts.append(text)
        return [{"type": "text_delta", "text": text}]

    def end(self) -> list[Payload]:
        return []

    def whole(self) -> BlockContent:
        return {"type": "text", "text": self.text, "citations": None}


class _Thinking(_Text):
    def __init__(self, *, is_shown: bool) -> None:
        super().__init__()
        self._is_shown = is_shown

    @property
    def _signature(self) -> str:
        return UNSIGNED if self._is_shown else hidden(self.text)

    def start(self) -> BlockContent:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def more(self, text: str) -> list[Payload]:
        self._texts.append(text)
        return [{"type": "thinking_delta", "thinking": text}] if self._is_shown else []

    def end(self) -> list[Payload]:
        return [{"type": "signature_delta", "signature": self._signature}]

    def whole(self) -> BlockContent:
        shown = self.text if self._is_shown else ""
        return {"type": "thinking", "thinking": shown, "signature": self._signature}


class _ToolUse(_Text):
    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._id = call_id
        self._name = name

    def start(self) -> BlockContent:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def more(self, text: str) -> list[Payload]:
        self._texts.append(text)
        return [{"type": "input_json_delta", "partial_json": text}]

    def whole(self) -> BlockContent:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": call_arguments(self.text)}


class BlockWriter:
    """Makes the blocks of one answer, and their events."""

    def __init__(
        self, reader: ChoiceReader, new_call_id: Callable[[str], str], *, shows_thinking: bool
    ) -> None:
        self._reader = reader
        self._new_call_id = new_call_id
        self._shows_thinking = shows_thinking
        self._blocks: list[_Text] = []
        self._is_open = False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, _ToolUse) for block in self._blocks)

    @property
    def content(self) -> list[BlockContent]:
        return [block.whole() for block in self._blocks]

    def read(self, delta: ChoiceDelta) -> list[StreamEvent]:
        """Read the next delta and return its events."""
        events = [event for part in self._reader.read(delta) for event in self._write(part)]
        return events + self.close() if delta.final is not None else events

    def close(self) -> list[StreamEvent]:
        """End the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        return [*self._deltas(self._blocks[-1].end()), self._event("content_block_stop")]

    def _write(self, part: Part) -> list[StreamEvent]:
        match part:
            case Content(text):
                return [*self._within(_Text), *self._more(text)]
            case Reasoning(text):
                return [*self._within(_Thinking), *self._more(text)]
            case CallStart(name):
                return self._begin(_ToolUse(self._new_call_id(name), name))
            case CallArguments(text):
                return self._more(text)

    def _within(self, kind: type[_Text]) -> list[StreamEvent]:
        """Begin a block of a kind, unless the open one is."""
        if self._is_open and type(self._blocks[-1]) is kind:
            return []
        return self._begin(_Thinking(is_shown=self._shows_thinking) if kind is _Thinking else _Text())

    def _begin(self, block: _Text) -> list[StreamEvent]:
        events = self.close()
        self._blocks.append(block)
        self._is_open = True
        return [*events, self._event("content_block_start", content_block=block.start())]

    def _more(self, text: str) -> list[StreamEvent]:
        return self._deltas(self._blocks[-1].more(text))

    def _deltas(self, deltas: Sequence[Payload]) -> list[StreamEvent]:
        return [self._event("content_block_delta", delta=delta) for delta in deltas]

    def _event(self, kind: str, **members: object) -> StreamEvent:
        return {"type": kind, "index": len(self._blocks) - 1, **members}


class MessageAnswer:
    """One message, from the accepted request to its end."""

    def __init__(self, message_id: str, model: str, request: MessagesRequest, turn: Turn) -> None:
        self._id = message_id
        self._model = model
        self._request = request
        self._writer = BlockWriter(turn.reader(), turn.new_call_id, shows_thinking=request.shows_thinking)
        self._num_prompt_tokens = len(turn.prompt)
        self._end: ChoiceDelta | None = None

    def read(self, event: Event) -> list[StreamEvent]:
        """Read an event and return those of the stream."""
        if not isinstance(event, ChoiceDelta):
            return []
        if event.final is not None:
            self._end = event
        return self._writer.read(event)

    def start(self) -> MessageObject:
        """Return the message as it begins. What was restored of its prompt is known at its end."""
        usage: MessageUsage = {
            "input_tokens": self._num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        }
        return self._message([], None, None, usage)

    def whole(self, tally: Tally) -> MessageObject:
        usage: MessageUsage = {**self.usage(tally), "service_tier": "standard"}
        return self._message(self._writer.content, *self.stop(tally), usage)

    def stop(self, tally: Tally) -> tuple[StopReason, str | None]:
        """Return why the message ended, and the stop sequence that ended it."""
        end = self._end
        assert end is not None, "a message has ended"
        if end.finish_reason == "length":
            was_shrunk = tally.num_output_tokens < self._request.max_tokens
            return ("model_context_window_exceeded" if was_shrunk else "max_tokens"), None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return ("tool_use" if self._writer.has_calls else "end_turn"), None

    def usage(self, tally: Tally) -> MessageUsage:
        return _usage(tally.usage(self._writer.num_reasoning_tokens))

    def _message(
        self,
        content: list[BlockContent],
        stop_reason: StopReason | None,
        stop_sequence: str | None,
        usage: MessageUsage,
    ) -> MessageObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


class MessageBody:
    """Collects a message that is not streamed."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    def add(self, _: int, event: Event, __: Tally) -> None:
        self._answer.read(event)

    async def body(self, tally: Tally) -> Payload:
        return self._answer.whole(tally)


class MessageStream:
    """Makes the events of a streamed message."""

    stream_type = PingedEventStream

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    def opening(self) -> Sequence[Payload]:
        return ({"type": "message_start", "message": self._answer.start()}, {"type": "ping"})

    def add(self, _: int, event: Event, __: Tally) -> Sequence[Payload]:
        return self._answer.read(event)

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        stop_reason, stop_sequence = self._answer.stop(tally)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return (
            {"type": "message_delta", "delta": delta, "usage": self._answer.usage(tally)},
            {"type": "message_stop"},
        )

    async def failure(self, error: ApiError, _: Tally) -> Sequence[Payload]:
        return (anthropic_error(error),)


def _usage(counts: Usage) -> MessageUsage:
    num_cached = counts["prompt_tokens_details"]["cached_tokens"]
    whole: MessageUsage = {
        "input_tokens": counts["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,  # storing a prompt costs nothing, and is not counted
        "cache_read_input_tokens": num_cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
        "cache": counts["cache"],
    }
    if "speculative_prefill" in counts:
        whole["speculative_prefill"] = counts["speculative_prefill"]
    return whole

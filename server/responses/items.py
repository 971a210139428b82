"""Builds the output items of one response, and their events in OpenAI's order."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from server.generation.choice_reader import ChoiceReader
from server.generation.choices import chat_token_logprob
from server.generation.events import ChoiceDelta
from server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.protocol.chat import ChatTokenLogprob
from server.protocol.response_items import OutputItem, OutputText, ReasoningText, Status, output_text
from server.text.logprobs import TokenLogprob

Event: TypeAlias = dict[str, Any]  # without its sequence number


class _OpenItem(abc.ABC):
    """An unfinished item."""

    def __init__(self, item_id: str, index: int) -> None:
        self.item_id = item_id
        self.index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abc.abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item with the text so far."""

    def event(self, kind: str, /, **members: object) -> Event:
        return {"type": f"response.{kind}", "item_id": self.item_id, "output_index": self.index, **members}

    def border(self, name: str, status: Status) -> Event:
        return {"type": f"response.output_item.{name}", "output_index": self.index, "item": self.item(status)}


class _Call(_OpenItem):
    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._name = name

    def item(self, status: Status) -> OutputItem:
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": status,
        }

    def opening(self) -> list[Event]:
        return [self.border("added", "in_progress")]

    def more(self, text: str) -> Event:
        self._texts.append(text)
        return self.event("function_call_arguments.delta", delta=text)

    def closing(self, status: Status) -> list[Event]:
        done = self.event("function_call_arguments.done", name=self._name, arguments=self.text)
        return [done, self.border("done", status)]


class _Text(_OpenItem):
    """An item with one part of text."""

    kind: str
    has_begun = False

    @abc.abstractmethod
    def part(self) -> OutputText | ReasoningText: ...

    @abc.abstractmethod
    def extras(self, logprobs: list[ChatTokenLogprob]) -> Mapping[str, object]:
        """Return the fields of a delta beside its text."""

    def opening(self) -> list[Event]:
        added = self.border("added", "in_progress")
        self.has_begun = True
        return [added, self.event("content_part.added", content_index=0, part=self.part())]

    def more(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._texts.append(text)
        return self.event(f"{self.kind}.delta", content_index=0, delta=text, **self.extras(logprobs))


class _Message(_Text):
    kind = "output_text"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._logprobs: list[ChatTokenLogprob] = []

    def part(self) -> OutputText:
        return output_text(self.text, list(self._logprobs))

    def item(self, status: Status) -> OutputItem:
        parts = [self.part()] if self.has_begun else []
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def extras(self, logprobs: list[ChatTokenLogprob]) -> Mapping[str, object]:
        self._logprobs += logprobs
        return {"logprobs": logprobs}

    def closing(self, status: Status) -> list[Event]:
        done = self.event("output_text.done", content_index=0, text=self.text, logprobs=list(self._logprobs))
        return [
            done,
            self.event("content_part.done", content_index=0, part=self.part()),
            self.border("done", status),
        ]


class _Thought(_Text):
    kind = "reasoning_text"

    def part(self) -> ReasoningText:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: Status) -> OutputItem:
        parts = [self.part()] if self.has_begun else []
        return {"id": self.item_id, "type": "reasoning", "summary": [], "content": parts, "status": status}

    def extras(self, logprobs: list[ChatTokenLogprob]) -> Mapping[str, object]:  # noqa: ARG002
        return {}

    def closing(self, status: Status) -> list[Event]:
        done = self.event("reasoning_text.done", content_index=0, text=self.text)
        return [
            done,
            self.event("content_part.done", content_index=0, part=self.part()),
            self.border("done", status),
        ]


class OutputWriter:
    """Writes one response. Item ids are `key` and a number; `new_call_id` returns the ids of calls."""

    def __init__(self, reader: ChoiceReader, key: str, new_call_id: Callable[[str], str]) -> None:
        self._reader = reader
        self._key = key
        self._new_call_id = new_call_id
        self._done: list[OutputItem] = []
        self._open: _Call | _Message | _Thought | None = None
        self._logprobs: list[TokenLogprob] = []  # of content that was not returned yet

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def items(self) -> list[OutputItem]:
        """The items, with the unfinished one."""
        return [*self._done, *([] if self._open is None else [self._open.item("in_progress")])]

    def read(self, delta: ChoiceDelta) -> list[Event]:
        """Read the next delta and return its events."""
        pieces = self._reader.read(delta)
        self._logprobs += self._reader.content_logprobs
        events = [event for piece in pieces for event in self._write(piece)]
        if delta.final is not None:
            events += self._end("completed" if delta.finish_reason == "stop" else "incomplete")
        return events

    def stop(self) -> None:
        """End the unfinished item as incomplete."""
        self._close("incomplete")

    def _write(self, piece: Part) -> list[Event]:
        match piece:
            case Content(text):
                events = []
                if not isinstance(self._open, _Message):
                    events = self._begin(_Message(self._id("msg"), self._num_items))
                assert isinstance(self._open, _Message)
                return [*events, self._open.more(text, self._take_logprobs())]
            case Reasoning(text):
                events = []
                if not isinstance(self._open, _Thought):
                    events = self._begin(_Thought(self._id("rs"), self._num_items))
                assert isinstance(self._open, _Thought)
                return [*events, self._open.more(text, [])]
            case CallStart(name):
                self._logprobs.clear()
                return self._begin(_Call(self._id("fc"), self._num_items, self._new_call_id(name), name))
            case CallArguments(text):
                self._logprobs.clear()
                assert isinstance(self._open, _Call)
                return [self._open.more(text)]

    def _begin(self, item: "_Call | _Message | _Thought") -> list[Event]:
        events = self._close("completed")
        self._open = item
        return events + item.opening()

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        self._done.append(self._open.item(status))
        events = self._open.closing(status)
        self._open = None
        return events

    def _end(self, status: Status) -> list[Event]:
        """Return the last events. An empty answer is a message without text."""
        events = [] if self.items else self._begin(_Message(self._id("msg"), 0))
        return events + self._close(status)

    def _take_logprobs(self) -> list[ChatTokenLogprob]:
        taken = [chat_token_logprob(token) for token in self._logprobs]
        self._logprobs = []
        return taken

    @property
    def _num_items(self) -> int:
        return len(self._done) + (self._open is not None)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._key}_{self._num_items}"

"""The answer to a request of `/v1/responses`: its prompt from items, its life from queued to its end, its body and its events."""

import itertools
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import Field, TypeAdapter

from server.generation.answer import Answer, Tally
from server.generation.conversation import Conversation, TurnRequest
from server.generation.output import ChoiceDelta
from server.grammar.structure import Structure
from server.http.errors import ApiError, invalid_value
from server.options.settings import ServerSettings
from server.protocol.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ItemReference,
    MessageItem,
    turns_of,
)
from server.protocol.responses import ResponsesRequest, ResponseUsage
from server.protocol.usage import Usage
from server.responses.items import OutputWriter
from server.responses.store import StoredResponse
from server.text.renderer import Renderer

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Resource: TypeAlias = Mapping[str, Any]

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Annotated[Item, Field(discriminator="type")]])


class Archive(Protocol):
    """What is kept for whoever asks."""

    def conversation(self, response_id: str) -> list[Resource]:
        """Return the items up to a response's end. Raises `ApiError` if there is no such response."""
        ...

    def item(self, item_id: str) -> Resource:
        """Return one item of a response. Raises `ApiError`."""
        ...

    def keep(self, response: StoredResponse) -> bool:
        """Keep a response and return True, unless it is too large."""
        ...


class ResponseAnswer(Answer):
    id_prefix = "resp_"
    names_events = True
    prompt_param = "input"

    def __init__(
        self, request: ResponsesRequest, model: str, settings: ServerSettings, archive: Archive
    ) -> None:
        super().__init__(request, model)
        self._request, self._settings, self._archive = request, settings, archive
        self._is_kept = request.store is not False and settings.storage.max_responses > 0
        self._key = uuid.uuid4().hex
        self.id = f"resp_{self._key}"
        self.status: Status = "queued" if request.background else "in_progress"
        self._error: ApiError | None = None
        self._completed_at: int | None = None
        self._usage: Usage | None = None
        self._input: list[Resource] = []
        self._conversation: Conversation | None = None
        self._writer: OutputWriter | None = None
        self._sampling: Mapping[str, float] = {}
        self._sequence = itertools.count()

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_logprobs(self) -> int | None:
        return self._request.num_logprobs

    @property
    def continues_prompt(self) -> bool:
        return False

    @property
    def kept_token_ids(self) -> frozenset[int]:
        return self._begun.kept_token_ids

    @property
    def structure(self) -> Structure | None:
        return self._begun.structure

    def max_tokens(self, room: int) -> int:
        limit = self._request.max_output_tokens
        return room if limit is None else limit

    async def render(self, renderer: Renderer) -> tuple[tuple[int, ...], ...]:
        request = self._request
        sampling = request.sampling_params(renderer.defaults, 0, None)
        self._sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if request.top_p is None else request.top_p,
        }
        turns = turns_of(self._items())
        if request.instructions is not None:
            turns = [{"role": "system", "content": request.instructions}, *turns]
        turn = TurnRequest(
            turns,
            request.tool_use,
            request.structure,
            None if request.reasoning is None else request.reasoning.effort,
            effort_param="reasoning.effort",
        )
        self._conversation = Conversation(turn, renderer, self._settings)
        prompt = await self._conversation.render()
        self._writer = OutputWriter(self._conversation.reader(), self._key, self._conversation.new_call_id)
        return (prompt,)

    def read(self, index: int, delta: ChoiceDelta, tally: Tally) -> Iterable[Mapping[str, object]]:
        writer = self._written
        events = writer.read(delta)
        tally.choices[index].num_reasoning_tokens = writer.num_reasoning_tokens
        return self._numbered(events)

    def opening(self) -> Iterable[Mapping[str, object]]:
        response = self.snapshot()
        return self._numbered(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def begin(self) -> None:
        """The engine has accepted the request."""
        self.status = "in_progress"

    def body(self, tally: Tally) -> Mapping[str, object]:
        [choice] = tally.choices
        self._usage, self._completed_at = tally.usage, int(time.time())
        self._end("completed" if choice.finish_reason == "stop" else "incomplete")
        return self.snapshot()

    def closing(self, tally: Tally) -> Iterable[Mapping[str, object]]:
        response = self.body(tally)
        return self._numbered([{"type": f"response.{self.status}", "response": response}])

    def failure(self, error: ApiError, tally: Tally) -> Iterable[Mapping[str, object]]:
        self._usage = tally.usage
        self.fail(error)
        return self._numbered([{"type": "response.failed", "response": self.snapshot()}])

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._stop("failed")

    def cancel(self) -> None:
        self._stop("cancelled")

    def snapshot(self) -> dict[str, object]:
        """Return the response as it is now."""
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": None
            if self._error is None
            else {"code": _error_code(self._error), "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.model,
            "output": [] if self._writer is None else self._writer.items,
            "store": self._is_kept,
            **self._sampling,
            **self._request.echo(),
        }
        return response if self._usage is None else response | {"usage": _usage(self._usage)}

    def _stop(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.stop()
        self._end(status)

    def _end(self, status: Status) -> None:
        self.status = status
        if self._is_kept:
            response = StoredResponse(
                self.id, json.dumps(self.snapshot()).encode(), json.dumps(self._input).encode()
            )
            self._is_kept = self._archive.keep(response)

    def _items(self) -> list[Item]:
        """Return all that the model is to see, and remember it as it will be given back."""
        request = self._request
        earlier = (
            []
            if request.previous_response_id is None
            else self._archive.conversation(request.previous_response_id)
        )
        given = (
            [MessageItem(role="user", content=request.input)]
            if isinstance(request.input, str)
            else request.input or []
        )
        num_items, limit = len(earlier) + len(given), self._settings.limits.max_messages
        if num_items > limit:
            raise invalid_value(
                f"'input' is limited to {limit} items by this server, earlier ones included, got {num_items}.",
                "input",
            )
        own = [
            self._archive.item(item.id)
            if isinstance(item, ItemReference)
            else item.resource(f"{self._key}_in{number}")
            for number, item in enumerate(given)
        ]
        self._input = [*earlier, *own]
        items = _ITEMS.validate_python(self._input)
        _check_calls(items)
        return items

    @property
    def _begun(self) -> Conversation:
        assert self._conversation is not None, "an answer is asked for once its prompt is rendered"
        return self._conversation

    @property
    def _written(self) -> OutputWriter:
        assert self._writer is not None, "an answer is asked for once its prompt is rendered"
        return self._writer

    def _numbered(self, events: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        return [{**event, "sequence_number": next(self._sequence)} for event in events]


def _check_calls(items: Sequence[Item]) -> None:
    """Refuse an output of a call that was never made."""
    called = set[str]()
    for item in items:
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in called:
            raise invalid_value(
                f"No tool call found for function call output with call_id '{item.call_id[:64]}'.", "input"
            )


def _error_code(error: ApiError) -> str:
    """Return one of the codes that OpenAI's schema has for errors inside of responses."""
    return (
        "rate_limit_exceeded"
        if error.status == 429
        else "invalid_prompt"
        if error.status < 500
        else "server_error"
    )


def _usage(counts: Usage) -> ResponseUsage:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": counts["total_tokens"],
        "cache": counts["cache"],
    }

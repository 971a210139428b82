"""A request of `/v1/responses`: its prompt, its status from queued to its end, its body and its events."""

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import Field, TypeAdapter

from backends.interface import BackendSpec
from server.generation.events import ChoiceDelta, Event
from server.generation.tally import Tally
from server.generation.task import Payload, Rendered, Task
from server.generation.turn import Turn, TurnRequest, render_turn
from server.http.errors import ApiError, invalid_value
from server.http.ignored import ignore
from server.http.streams import NamedEventStream
from server.options.settings import ServerSettings
from server.protocol.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    OutputItem,
    SkippedItem,
    turns_of,
    without_oldest,
)
from server.protocol.responses import ResponsesRequest, ResponseUsage
from server.protocol.usage import Usage
from server.responses.items import OutputWriter
from server.state.interface import StoredResponse
from server.text.renderer import Renderer

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Resource: TypeAlias = Mapping[str, Any]

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Annotated[Item, Field(discriminator="type")]])


class Archive(Protocol):
    """The stored responses of one owner."""

    async def conversation(self, response_id: str) -> list[Resource]:
        """Return the items up to a response's end. Raises `ApiError` if there is no such response."""
        ...

    async def item(self, item_id: str) -> Resource:
        """Return one item of a response. Raises `ApiError`."""
        ...

    async def keep(self, response: StoredResponse) -> bool:
        """Store a response and return True, unless it is too large."""
        ...


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The model's input: items as they are returned to clients, and their turns."""

    resources: Sequence[Resource]
    turns: Sequence[Mapping[str, Any]]


class ModelResponse:
    """One response from its request to its end; it is stored when it has ended."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        settings: ServerSettings,
        archive: Archive,
        spec: BackendSpec,
    ) -> None:
        self._request = request
        self._model = model
        self._settings = settings
        self._archive = archive
        self._spec = spec
        self._key = uuid.uuid4().hex
        self.id = f"resp_{self._key}"
        self._is_stored = request.store is not False and settings.storage.max_responses > 0
        self._created = int(time.time())
        self._completed_at: int | None = None
        self._status: Status = "queued" if request.background else "in_progress"
        self._error: ApiError | None = None
        self._usage: Usage | None = None
        self._sampling: Mapping[str, float] = {}
        self._input: Sequence[Resource] = ()
        self._writer: OutputWriter | None = None  # None until the prompt is rendered

    def task(self) -> Task:
        """Return the task that makes this response."""
        limit = self._request.max_output_tokens
        return Task(
            id=self.id,
            model=self._model,
            options=self._request,
            num_prompts=1,
            prompt_param="input",
            max_tokens=lambda room: room if limit is None else limit,
            render=self._render,
            num_logprobs=self._request.num_logprobs,
            truncates=self._request.truncation == "auto",
        )

    async def _render(self, renderer: Renderer) -> Rendered:
        request = self._request
        sampling = request.sampling_params(renderer.defaults, 0, None)
        top_p = sampling.top_p if request.top_p is None else request.top_p
        self._sampling = {"temperature": sampling.temperature, "top_p": top_p}
        source = await self._read_input()
        self._input = source.resources
        turn = await self._render_turn(source, renderer)
        writer = OutputWriter(turn.reader(), self._key, turn.new_call_id)
        self._writer = writer
        return Rendered(
            (turn.prompt,),
            body=lambda: ResponseBody(self, writer),
            stream=lambda: ResponseStream(self, writer),
            structure=turn.structure,
            thinking=turn.thinking,
            kept_token_ids=turn.kept_token_ids,
            question=turn.question,
            source=turn.source,
        )

    async def _render_turn(self, source: ResponseInput, renderer: Renderer) -> Turn:
        """Render the prompt. With `truncation: auto`, the oldest turns are left out until it fits."""
        request = self._request
        room = self._spec.max_model_len - (request.max_output_tokens or 1)
        messages = list(source.turns)
        least_share = 0.01  # of the texts to drop; it doubles, so that a few rounds are enough
        while True:
            turn = await render_turn(self._turn_request(messages), renderer, self._settings)
            num_tokens = len(turn.prompt)
            if request.truncation != "auto" or num_tokens <= room:
                return turn
            rest = without_oldest(messages, max(1 - room / num_tokens, least_share))
            least_share *= 2
            if len(rest) == len(messages):
                return turn  # it is refused at admission
            messages = rest

    def _turn_request(self, messages: Sequence[Mapping[str, Any]]) -> TurnRequest:
        request = self._request
        turns = list(messages)
        if request.instructions is not None:
            turns.insert(0, {"role": "system", "content": request.instructions})
        return TurnRequest(
            turns,
            request.tool_use,
            request.structure,
            None if request.reasoning is None else request.reasoning.effort,
            effort_param="reasoning.effort",
            verbosity=None if request.text is None else request.text.verbosity,
            verbosity_param="text.verbosity",
        )

    async def _read_input(self) -> ResponseInput:
        """Return earlier items and the request's own. Raises `ApiError`."""
        request = self._request
        earlier: list[Resource] = []
        if request.previous_response_id is not None:
            earlier = await self._archive.conversation(request.previous_response_id)
        items = [] if request.input is None else request.input
        if isinstance(items, str):
            items = [MessageItem(role="user", content=items)]
        num_items = len(earlier) + len(items)
        limit = self._settings.limits.max_messages
        if num_items > limit:
            raise invalid_value(
                f"'input' is limited to {limit} items by this server, earlier ones included, "
                f"got {num_items}.",
                "input",
            )
        resources = [*earlier, *[each async for each in self._own_resources(items)]]
        parsed = _ITEMS.validate_python(resources)
        _check_calls(parsed)
        return ResponseInput(resources, turns_of(parsed))

    async def _own_resources(self, items: Sequence[InputItem]) -> AsyncIterator[Resource]:
        for index, item in enumerate(items):
            match item:
                case ItemReference():
                    yield await self._archive.item(item.id)
                case SkippedItem():
                    ignore(f"input.{item.type}")
                case _:
                    yield item.resource(f"{self._key}_in{index}")

    def start(self) -> None:
        """The engine has accepted the request."""
        self._status = "in_progress"

    async def complete(self, finish_reason: str, usage: Usage) -> None:
        """The answer has ended, by itself or at a limit."""
        self._usage = usage
        self._completed_at = int(time.time())
        await self._end("completed" if finish_reason == "stop" else "incomplete")

    async def fail(self, error: ApiError, usage: Usage | None = None) -> None:
        self._error = error
        self._usage = usage
        await self._stop("failed")

    async def cancel(self) -> None:
        await self._stop("cancelled")

    @property
    def status(self) -> Status:
        return self._status

    def snapshot(self) -> dict[str, object]:
        """Return the response as it is now."""
        error = self._error
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": ({"reason": "max_output_tokens"} if self._status == "incomplete" else None),
            "model": self._model,
            "output": self._output(),
            "store": self._is_stored,
            **self._sampling,
            **self._request.echo(),
        }
        if self._usage is not None:
            response["usage"] = _usage(self._usage)
        return response

    def _output(self) -> list[OutputItem]:
        return [] if self._writer is None else self._writer.items

    async def _stop(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.stop()
        await self._end(status)

    async def _end(self, status: Status) -> None:
        self._status = status
        if self._is_stored:
            body = json.dumps(self.snapshot()).encode()
            self._is_stored = await self._archive.keep(
                StoredResponse(self.id, body, json.dumps(list(self._input)).encode())
            )


class ResponseBody:
    """Collects a response that is not streamed, or made in the background."""

    def __init__(self, response: ModelResponse, writer: OutputWriter) -> None:
        self._response = response
        self._writer = writer
        self._finish_reason = "stop"

    def add(self, _: int, event: Event, __: Tally) -> None:
        if isinstance(event, ChoiceDelta):
            self._writer.read(event)
            self._finish_reason = event.finish_reason or self._finish_reason

    async def body(self, tally: Tally) -> Payload:
        await self._response.complete(self._finish_reason, tally.usage(self._writer.num_reasoning_tokens))
        return self._response.snapshot()


class ResponseStream:
    """Makes the events of a streamed response, numbered in order."""

    stream_type = NamedEventStream

    def __init__(self, response: ModelResponse, writer: OutputWriter) -> None:
        self._response = response
        self._writer = writer
        self._finish_reason = "stop"
        self._sequence = itertools.count()

    def opening(self) -> Sequence[Payload]:
        response = self._response.snapshot()
        return self._numbered(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def add(self, _: int, event: Event, __: Tally) -> Sequence[Payload]:
        if not isinstance(event, ChoiceDelta):
            return ()
        self._finish_reason = event.finish_reason or self._finish_reason
        return self._numbered(self._writer.read(event))

    async def closing(self, tally: Tally) -> Sequence[Payload]:
        await self._response.complete(self._finish_reason, tally.usage(self._writer.num_reasoning_tokens))
        return self._end()

    async def failure(self, error: ApiError, tally: Tally) -> Sequence[Payload]:
        await self._response.fail(error, tally.usage(self._writer.num_reasoning_tokens))
        return self._end()

    def _end(self) -> Sequence[Payload]:
        return self._numbered(
            [{"type": f"response.{self._response.status}", "response": self._response.snapshot()}]
        )

    def _numbered(self, events: Sequence[Payload]) -> list[Payload]:
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
    """Return one of the codes that OpenAI's schema has for errors inside responses."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def _usage(counts: Usage) -> ResponseUsage:
    whole: ResponseUsage = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": counts["total_tokens"],
        "cache": counts["cache"],
    }
    if "speculative_prefill" in counts:
        whole["speculative_prefill"] = counts["speculative_prefill"]
    return whole

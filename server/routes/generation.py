"""The one path that every generated answer takes, of whichever family and streamed or not.

A place is taken before any work is done and given back on every exit; nothing is sent before the engine has accepted; a client that has
gone ends its request, whatever that request is waiting for.
"""

import asyncio
import logging
import random
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from scheduler.admission import max_output_tokens
from scheduler.messages import Add, StopCriteria
from server.admission import (
    check_admissible,
    check_features,
    check_length,
    check_limits,
    check_prefill,
    check_prompt,
    check_structure,
    check_vocabulary,
)
from server.answer import Answer, Tally
from server.client import Ticket
from server.disconnect import run_until_disconnect
from server.errors import invalid_value
from server.failures import as_api_error
from server.feed import EventFeed
from server.output import Accepted, ChoiceDelta, Event, Generation, Progress, PromptLogprobs
from server.renderer import RenderError
from server.request_record import RequestRecord
from server.services import Services
from server.sse import EventStream
from server.structure import StructureError

logger: Final = logging.getLogger(__name__)


class GenerationResponse(Response):
    """A response whose body is generated while it is sent."""

    def __init__(self, services: Services, answer: Answer) -> None:
        super().__init__()
        self._services = services
        self._answer = answer
        self._options = answer.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_time = self._services.client.now()
        check_limits(self._options, self._answer.num_prompts, self._services.settings)
        tenant = RequestRecord.of(scope).tenant or self._options.user or ""
        with self._services.client.reserve(self._answer.num_prompts * self._options.num_choices, tenant) as ticket:
            adds = await self._adds(arrival_time, tenant)
            tally = Tally.start(tuple(len(add.prompt_token_ids) for add in adds), self._options.num_choices)
            async with self._feed(adds, ticket) as feed:
                await feed.accepted()
                if self._options.stream:
                    await self._stream(feed, tally, EventStream(send))
                    return
                while (item := await feed.next()) is not None:
                    self._take(tally, *item)
        await JSONResponse(self._answer.body(tally.choices, tally.usage))(scope, receive, send)

    def _feed(self, adds: list[Add], ticket: Ticket) -> EventFeed:
        options, services = self._options, self._services
        generations = [
            Generation(
                services.client,
                services.renderer,
                add,
                stop=options.stop_strings,
                include_stop_str_in_output=bool(options.include_stop_str_in_output),
                skip_special_tokens=options.skip_special_tokens is not False,
                continues_prompt=self._answer.continues_prompt,
                kept_token_ids=self._answer.kept_token_ids,
            )
            for add in adds
        ]
        return EventFeed(generations, ticket)

    async def _adds(self, arrival_time: float, tenant: str) -> list[Add]:
        """Return what the engine is asked for, one request a prompt."""
        check_vocabulary(self._options, self._services.client.spec.vocab_size)
        try:
            prompts = await self._answer.render(self._services.renderer)
        except RenderError as error:
            raise invalid_value(str(error), self._answer.prompt_param) from error
        grammar = await self._grammar()
        seed = random.getrandbits(63)
        return [self._add(number, prompt, seed, arrival_time, grammar, tenant) for number, prompt in enumerate(prompts)]

    async def _grammar(self) -> str | None:
        """Return the grammar that the answers must follow."""
        structure = self._answer.structure
        if structure is None:
            return None
        check_structure(structure, self._services.client.spec.features)
        try:
            return await self._services.grammars.compile(structure)
        except StructureError as error:
            raise invalid_value(f"'{structure.param}' cannot be followed: {error}.", structure.param) from error

    def _add(self, number: int, prompt: tuple[int, ...], seed: int, arrival_time: float, grammar: str | None, tenant: str) -> Add:
        options, answer = self._options, self._answer
        spec, settings = self._services.client.spec, self._services.settings
        stop_token_ids = frozenset() if options.ignore_eos else self._services.renderer.stop_token_ids
        check_prompt(prompt, spec.vocab_size, answer.prompt_param)
        check_prefill(options.num_prefill_tokens, len(prompt), answer.prompt_param)
        num_forced = 0 if options.num_prefill_tokens is None else len(prompt) - options.num_prefill_tokens
        room = max_output_tokens(len(prompt), num_forced, spec)
        max_tokens = answer.max_tokens(max(room, 1))
        check_length(len(prompt), max_tokens, room, spec.max_model_len, answer.prompt_param)
        min_tokens = options.min_tokens or 0
        if min_tokens > max_tokens:
            raise invalid_value(f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens may be generated.", "min_tokens")
        add = Add(
            request_id=f"{answer.id}-{number}",
            prompt_token_ids=prompt,
            sampling=options.sampling_params(self._services.renderer.defaults, seed, answer.num_logprobs),
            stop=StopCriteria(max_tokens, min_tokens, stop_token_ids | frozenset(options.stop_token_ids or ())),
            arrival_time=arrival_time,
            num_choices=options.num_choices,
            priority=options.priority or 0,
            queue_timeout=_shorter(options.queue_timeout, settings.queue_timeout),
            timeout=_shorter(options.request_timeout, settings.request_timeout),
            num_prompt_logprobs=answer.num_prompt_logprobs,
            num_prefill_tokens=options.num_prefill_tokens,
            grammar=grammar,
            tenant=tenant,
        )
        check_features(options, add, spec.features)
        check_admissible(add, spec, answer.prompt_param)
        return add

    async def _stream(self, feed: EventFeed, tally: Tally, stream: EventStream) -> None:
        """Send the events as they come. What goes wrong from here on can only be told inside the stream."""
        await stream.start()
        try:
            await self._send_events(feed, tally, stream)
            if self._options.includes_usage:
                await stream.data(self._answer.chunk() | {"usage": tally.usage})
            await stream.done()
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                logger.exception("request %s failed while its answer was streamed", self._answer.id)
            await stream.data(failure.body())
        await stream.close()

    async def _send_events(self, feed: EventFeed, tally: Tally, stream: EventStream) -> None:
        clock, interval = asyncio.get_running_loop().time, self._services.settings.keepalive_interval
        last_sent = clock()
        while True:
            try:
                item = await feed.next(last_sent + interval)
            except TimeoutError:
                await stream.comment(tally.progress)
                last_sent = clock()
                continue
            if item is None:
                return
            for chunk in self._take(tally, *item):
                await stream.data(chunk)
                last_sent = clock()

    def _take(self, tally: Tally, prompt: int, event: Event) -> list[dict[str, object]]:
        """Take an event into account and return the chunks that tell it."""
        match event:
            case Progress(num_computed_prompt_tokens=num_read):
                tally.num_read[prompt] = num_read
            case PromptLogprobs(tokens=tokens):
                self._answer.take_prompt_logprobs(prompt, tokens)
            case ChoiceDelta():
                index = prompt * self._options.num_choices + event.choice
                tally.num_read[prompt] = tally.num_prompt_tokens[prompt]
                tally.choices[index].add(event)
                return self._chunks(tally, index, event)
            case Accepted():
                pass
        return []

    def _chunks(self, tally: Tally, index: int, delta: ChoiceDelta) -> list[dict[str, object]]:
        if not self._options.stream:
            return []
        chunks = [self._answer.chunk(choice) for choice in self._answer.chunk_choices(index, delta)]
        if not self._options.includes_usage:
            return chunks
        counts = tally.usage if self._options.includes_continuous_usage else None
        return [chunk | {"usage": counts} for chunk in chunks]


def _shorter(given: float | None, bound: float | None) -> float | None:
    """Return the shorter of two times, of which None is endless."""
    return min((seconds for seconds in (given, bound) if seconds is not None), default=None)

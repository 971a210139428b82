"""The one path that every generated answer takes, of whichever family and streamed or not.

A place is taken before any work is done and given back on every exit; nothing is sent before the engine has accepted; a client that has
gone ends its request, whatever that request is waiting for.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation.answer import Answer
from server.generation.failures import as_api_error
from server.generation.feed import EventFeed
from server.generation.request_run import CACHE_POLICY_HEADER, RequestRun
from server.http.disconnect import run_until_disconnect
from server.http.jsontext import ascii_json
from server.http.record import RequestRecord
from server.http.sse import EventStream
from server.services import Services

logger: Final = logging.getLogger(__name__)


class GenerationResponse(Response):
    """A response whose body is generated while it is sent."""

    def __init__(self, services: Services, answer: Answer) -> None:
        super().__init__()
        self._services = services
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        cache_policy = Headers(scope=scope).get(CACHE_POLICY_HEADER)
        run = RequestRun(self._services, self._answer, RequestRecord.of(scope), cache_policy)
        with run.reserve() as ticket:
            await run.prepare()
            async with run.feed(ticket) as feed:
                await run.accept(feed)
                if self._answer.options.stream:
                    await self._stream(run, feed, EventStream(send))
                    return
                await run.finish(feed)
        await Response(ascii_json(self._answer.body(run.tally)), media_type="application/json")(
            scope, receive, send
        )

    async def _stream(self, run: RequestRun, feed: EventFeed, stream: EventStream) -> None:
        """Send the events as they come. What goes wrong from here on can only be told inside the stream."""
        await stream.start()
        try:
            await self._send(stream, self._answer.opening())
            await self._send_events(run, feed, stream)
            await self._send(stream, self._answer.closing(run.tally))
            if not self._answer.names_events:
                await stream.done()
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                logger.exception("request %s failed while its answer was streamed", self._answer.id)
            await self._send(stream, self._answer.failure(failure, run.tally))
        await stream.close()

    async def _send_events(self, run: RequestRun, feed: EventFeed, stream: EventStream) -> None:
        clock, interval = asyncio.get_running_loop().time, self._services.settings.keepalive_interval
        last_sent = clock()
        while True:
            try:
                item = await feed.next(last_sent + interval)
            except TimeoutError:
                await stream.comment(run.tally.progress)
                last_sent = clock()
                continue
            if item is None:
                return
            if await self._send(stream, run.take(*item)):
                last_sent = clock()

    async def _send(self, stream: EventStream, events: Iterable[Mapping[str, object]]) -> int:
        """Send events and return how many there were."""
        num_sent = 0
        for event in events:
            await stream.data(event, str(event["type"]) if self._answer.names_events else None)
            num_sent += 1
        return num_sent

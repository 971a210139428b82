"""An HTTP response whose body is generated while the client waits; if the client leaves, its request ends."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation.failures import as_api_error
from server.generation.path import Accepted, Call, accept, prepare, reserve, submit
from server.generation.task import Payload, StreamFormatter, Task
from server.http.disconnect import run_until_disconnect
from server.http.json_response import json_response
from server.http.record import RequestRecord
from server.http.streams import EventStream
from server.services import Services

logger: Final = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Answers one task, streamed if its request says so."""

    def __init__(self, services: Services, task: Task) -> None:
        super().__init__()
        self._services = services
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._task, RequestRecord.of(scope), Headers(scope=scope), self._services)
        reserved = await reserve(call)
        with reserved.ticket:
            prepared = await prepare(reserved)
            with submit(prepared) as submitted:
                accepted = await accept(submitted)
                make_stream = accepted.rendered.stream
                if self._task.options.stream and make_stream is not None:
                    await self._stream(accepted, make_stream(), send)
                    return
                body = await collect(accepted)
        await json_response(body)(scope, receive, send)

    async def _stream(self, accepted: Accepted, formatter: StreamFormatter, send: Send) -> None:
        """Send events as they come. A failure from here on can only be reported inside the stream."""
        stream = formatter.stream_type(send)
        sender = _Sender(stream, formatter)
        await stream.start()
        try:
            await sender.send(formatter.opening())
            await self._send_events(accepted, sender)
            await sender.send(await formatter.closing(accepted.tally))
            await stream.done()
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                logger.exception("request %s failed inside its stream", self._task.id)
            await sender.send(await formatter.failure(failure, accepted.tally))
        await stream.close()

    async def _send_events(self, accepted: Accepted, sender: "_Sender") -> None:
        clock = asyncio.get_running_loop().time
        interval = self._services.settings.api.keepalive_interval
        last_sent = clock()
        while True:
            try:
                item = await accepted.next(last_sent + interval)
            except TimeoutError:
                await sender.stream.keep_alive(accepted.tally.progress)
                last_sent = clock()
                continue
            if item is None:
                return
            payloads = sender.formatter.add(*item, accepted.tally)
            if payloads:
                await sender.send(payloads)
                last_sent = clock()


class _Sender:
    """Writes a family's events to a stream."""

    def __init__(self, stream: EventStream, formatter: StreamFormatter) -> None:
        self.stream = stream
        self.formatter = formatter

    async def send(self, payloads: Sequence[Payload]) -> None:
        for payload in payloads:
            await self.stream.data(payload)


async def collect(accepted: Accepted) -> Payload:
    """Return the whole answer, and add the headers that report its cache. Raises `GenerationError`."""
    formatter = accepted.rendered.body()
    while (item := await accepted.next()) is not None:
        formatter.add(*item, accepted.tally)
    if accepted.call.task.pooling is None:
        cache = accepted.tally.cache
        accepted.call.record.headers |= {
            "x-cache-hit-tokens": str(accepted.tally.num_cached_tokens),
            "x-cache-kept-tokens": str(cache["kept_tokens"]),
            "x-cache-evicted-tokens": str(cache["evicted_tokens"]),
            "x-cache-compression": f"{cache['compression']:g}",
        }
    return await formatter.body(accepted.tally)

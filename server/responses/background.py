"""Responses that are made while nobody waits for them. Each holds its places as if somebody did, which bounds their number."""

import asyncio
import logging
from typing import Final

from server.engine.client import Ticket
from server.generation.failures import as_api_error
from server.generation.request_run import RequestRun
from server.http.errors import ApiError
from server.responses.answer import ResponseAnswer

logger: Final = logging.getLogger(__name__)


class BackgroundResponses:
    """The ones that have not ended, by owner and id. One that has ended is where its answer keeps it."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[ResponseAnswer, asyncio.Task[None]]] = {}

    async def start(self, owner: str, answer: ResponseAnswer, run: RequestRun) -> None:
        """Begin to make a response. Raises what refuses it; from then on its failures are in its body."""
        ticket = run.reserve()
        try:
            await run.prepare()
        except BaseException:
            ticket.release()
            raise
        run.detach()
        place = (owner, answer.id)
        task = asyncio.create_task(self._make(answer, run, ticket))
        self._running[place] = (answer, task)
        task.add_done_callback(lambda _: self._running.pop(place))

    def get(self, owner: str, response_id: str) -> ResponseAnswer | None:
        found = self._running.get((owner, response_id))
        return None if found is None else found[0]

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a response, if it has not ended."""
        found = self._running.get((owner, response_id))
        if found is not None:
            found[1].cancel()
            await asyncio.wait((found[1],))

    async def _make(self, answer: ResponseAnswer, run: RequestRun, ticket: Ticket) -> None:
        try:
            with ticket:
                async with run.feed(ticket) as feed:
                    await run.accept(feed)
                    answer.begin()
                    await run.finish(feed)
            answer.body(run.tally)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except Exception as error:
            answer.fail(self._told(answer, error))
        finally:
            run.end()

    def _told(self, answer: ResponseAnswer, error: Exception) -> ApiError:
        failure = as_api_error(error)
        if failure.status == 500:
            logger.error("response %s failed in the background", answer.id, exc_info=error)
        return failure

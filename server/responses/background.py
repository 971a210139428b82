"""Responses that are generated in the background. Each holds a ticket, which limits their number.

The other replicas see them in the shared state, where each is announced until it has ended.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Final

from server.generation.failures import as_api_error
from server.generation.path import Call, Prepared, accept, prepare, reserve, submit
from server.generation.response import collect
from server.http.errors import ApiError
from server.responses.model_response import ModelResponse
from server.state.interface import ANNOUNCE_INTERVAL, LEASE, Responses, StateError

logger: Final = logging.getLogger(__name__)


class BackgroundResponses:
    """The unfinished responses of this replica, by owner and id. A finished one is in the store."""

    def __init__(self, store: Responses, endings: set[asyncio.Task[None]]) -> None:
        """`endings` gets the task that stores each response's end, until it has."""
        self._store = store
        self._endings = endings
        self._running: dict[tuple[str, str], _Running] = {}

    async def start(self, owner: str, response: ModelResponse, call: Call) -> None:
        """Start a response. Raises the error that refuses it; a later failure is in its body."""
        reserved = await reserve(call)
        try:
            prepared = await prepare(reserved)
            # Before the client has the id, which it may send to another replica.
            await self._announce(owner, response)
        except BaseException:
            reserved.ticket.release()
            raise
        call.record.detach()
        key = (owner, response.id)
        generating = asyncio.create_task(_generate(response, prepared))
        ending = asyncio.create_task(self._end(owner, response, prepared, generating))
        self._running[key] = _Running(response, generating, ending)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        ending.add_done_callback(lambda _: self._running.pop(key))

    def get(self, owner: str, response_id: str) -> ModelResponse | None:
        found = self._running.get((owner, response_id))
        return None if found is None else found.response

    async def cancel(self, owner: str, response_id: str) -> bool:
        """End a response, if it is made here and has not ended. Returns whether it is."""
        found = self._running.get((owner, response_id))
        if found is None:
            return False
        found.generating.cancel()
        await asyncio.wait((found.ending,))
        return True

    async def _end(
        self, owner: str, response: ModelResponse, prepared: Prepared, generating: asyncio.Task[None]
    ) -> None:
        """Wait for a response's generation, and store how it ended."""
        announcing = asyncio.create_task(self._keep_announcing(owner, response, generating))
        try:
            await asyncio.wait((generating,))
            if generating.cancelled():
                await response.cancel()
            elif isinstance(error := generating.exception(), Exception):
                await response.fail(_api_error(response, error))
        finally:
            prepared.ticket.release()  # of a task that was cancelled before it began
            prepared.call.record.end()
            announcing.cancel()
            await asyncio.wait((announcing,))
            await self._store.withdraw(owner, response.id)

    async def _announce(self, owner: str, response: ModelResponse) -> None:
        await self._store.announce(owner, response.id, json.dumps(response.snapshot()).encode())

    async def _keep_announcing(
        self, owner: str, response: ModelResponse, generating: asyncio.Task[None]
    ) -> None:
        status, age = response.status, 0.0
        while True:
            await asyncio.sleep(ANNOUNCE_INTERVAL)
            age += ANNOUNCE_INTERVAL
            try:
                if response.status != status or age >= LEASE:  # a state that was restarted has lost it
                    await self._announce(owner, response)
                    status, age = response.status, 0.0
                if not await self._store.announce(owner, response.id, None):
                    generating.cancel()
                    return
            except StateError:
                continue  # the response is stored at its end, if the state is back by then


@dataclass(frozen=True, slots=True)
class _Running:
    """A cancel ends `generating` alone, so that `ending` stores the response and withdraws it."""

    response: ModelResponse
    generating: asyncio.Task[None]
    ending: asyncio.Task[None]


async def _generate(response: ModelResponse, prepared: Prepared) -> None:
    with prepared.ticket, submit(prepared) as submitted:
        accepted = await accept(submitted)
        response.start()
        await collect(accepted)


def _api_error(response: ModelResponse, error: Exception) -> ApiError:
    failure = as_api_error(error)
    if failure.status == 500:
        logger.error("response %s failed in the background", response.id, exc_info=error)
    return failure

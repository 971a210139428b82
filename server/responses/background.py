"""Responses that are generated in the background. Each holds a ticket, which limits their number."""

import asyncio
import logging
from typing import Final

from server.generation.failures import as_api_error
from server.generation.path import Call, Prepared, accept, prepare, reserve, submit
from server.generation.response import collect
from server.http.errors import ApiError
from server.responses.model_response import ModelResponse

logger: Final = logging.getLogger(__name__)


class BackgroundResponses:
    """The unfinished responses, by owner and id. A finished one is in the store."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[ModelResponse, asyncio.Task[None]]] = {}

    async def start(self, owner: str, response: ModelResponse, call: Call) -> None:
        """Start a response. Raises the error that refuses it; a later failure is in its body."""
        reserved = reserve(call)
        try:
            prepared = await prepare(reserved)
        except BaseException:
            reserved.ticket.release()
            raise
        call.record.detach()
        key = (owner, response.id)
        task = asyncio.create_task(self._make(response, prepared))
        self._running[key] = (response, task)
        task.add_done_callback(lambda _: self._running.pop(key))

    def get(self, owner: str, response_id: str) -> ModelResponse | None:
        found = self._running.get((owner, response_id))
        return None if found is None else found[0]

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a response, if it has not ended."""
        found = self._running.get((owner, response_id))
        if found is not None:
            _, task = found
            task.cancel()
            await asyncio.wait((task,))

    async def _make(self, response: ModelResponse, prepared: Prepared) -> None:
        try:
            with prepared.ticket, submit(prepared) as submitted:
                accepted = await accept(submitted)
                response.start()
                await collect(accepted)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            response.fail(_api_error(response, error))
        finally:
            prepared.call.record.end()


def _api_error(response: ModelResponse, error: Exception) -> ApiError:
    failure = as_api_error(error)
    if failure.status == 500:
        logger.error("response %s failed in the background", response.id, exc_info=error)
    return failure

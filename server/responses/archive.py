"""What one owner can reach: stored responses, and those that are still made in the background."""

import asyncio
import json
from typing import Any

from server.http.errors import ApiError, invalid_value
from server.responses.background import BackgroundResponses
from server.responses.model_response import Resource
from server.state.interface import ANNOUNCE_INTERVAL, Responses, StoredResponse

LOST = {"code": "server_error", "message": "The server that generated this response has ended."}


class OwnedArchive:
    """The responses of one owner. Reading methods and `delete` raise `ApiError` for an unknown id, and
    `StateError`.
    """

    def __init__(self, store: Responses, background: BackgroundResponses, owner: str) -> None:
        self._store = store
        self._background = background
        self.owner = owner

    async def get(self, response_id: str) -> StoredResponse:
        stored = await self._store.get(self.owner, response_id)
        if stored is None:
            raise not_found("Response", response_id)
        return stored

    async def conversation(self, response_id: str) -> list[Resource]:
        """Return the items up to a response's end, which a later response continues."""
        unfinished = await self._unfinished(response_id)
        if unfinished is not None and unfinished["status"] != "failed":
            raise invalid_value(f"The response '{response_id}' has not ended.", "previous_response_id")
        stored = await self._store.get(self.owner, response_id)
        if stored is not None:
            return _items(stored)
        message = f"Previous response with id '{response_id[:128]}' not found."
        raise ApiError(400, "previous_response_not_found", message, param="previous_response_id")

    async def item(self, item_id: str) -> Resource:
        """Return one item of a response: an item's id contains its response's."""
        key = item_id.partition("_")[2].partition("_")[0]
        stored = await self._store.get(self.owner, f"resp_{key}")
        for item in [] if stored is None else _items(stored):
            if item["id"] == item_id:
                return item
        raise not_found("Item", item_id, "input")

    async def keep(self, response: StoredResponse) -> bool:
        return await self._store.put(self.owner, response)

    async def body(self, response_id: str) -> dict[str, Any]:
        """Return a response, whether it has ended or not."""
        # In this order, since a response that ends is stored before it is withdrawn.
        unfinished = await self._unfinished(response_id)
        if unfinished is not None and unfinished["status"] != "failed":
            return unfinished
        stored = await self._store.get(self.owner, response_id)
        if stored is not None:
            body: dict[str, Any] = json.loads(stored.body)
            return body
        if unfinished is None:
            raise not_found("Response", response_id)
        return unfinished

    async def cancel(self, response_id: str) -> None:
        """End a response that is made in the background, here or at another replica."""
        if await self._background.cancel(self.owner, response_id):
            return
        running = await self._store.running(self.owner, response_id)
        if running is None or not running.is_alive:
            return
        await self._store.cancel(self.owner, response_id)
        # The replica sees it when it announces the response again.
        deadline = asyncio.get_running_loop().time() + 5 * ANNOUNCE_INTERVAL
        while asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(ANNOUNCE_INTERVAL / 10)
            running = await self._store.running(self.owner, response_id)
            if running is None:
                return

    async def delete(self, response_id: str) -> None:
        if not await self._store.delete(self.owner, response_id):
            raise not_found("Response", response_id)

    async def _unfinished(self, response_id: str) -> dict[str, Any] | None:
        """Return a response that is still made; as failed if the replica that made it is gone."""
        here = self._background.get(self.owner, response_id)
        if here is not None:
            return here.snapshot()
        running = await self._store.running(self.owner, response_id)
        if running is None:
            return None
        body: dict[str, Any] = json.loads(running.body)
        return body if running.is_alive else {**body, "status": "failed", "error": LOST}


def _items(stored: StoredResponse) -> list[Resource]:
    return [*json.loads(stored.input_items), *json.loads(stored.body)["output"]]


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    return ApiError(404, "not_found", f"{kind} with id '{name[:128]}' not found.", param=param)

"""What one owner can reach: stored responses, and those that are still made in the background."""

import json
from typing import Any

from server.http.errors import ApiError, invalid_value
from server.responses.background import BackgroundResponses
from server.responses.model_response import Resource
from server.responses.store import ResponseStore, StoredResponse


class OwnedArchive:
    """The responses of one owner. Reading methods and `delete` raise `ApiError` for an unknown id."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses, owner: str) -> None:
        self._store = store
        self._background = background
        self.owner = owner

    def get(self, response_id: str) -> StoredResponse:
        stored = self._store.get(self.owner, response_id)
        if stored is None:
            raise not_found("Response", response_id)
        return stored

    def conversation(self, response_id: str) -> list[Resource]:
        """Return the items up to a response's end, which a later response continues."""
        if self._background.get(self.owner, response_id) is not None:
            raise invalid_value(f"The response '{response_id}' has not ended.", "previous_response_id")
        stored = self._store.get(self.owner, response_id)
        if stored is None:
            message = f"Previous response with id '{response_id[:128]}' not found."
            raise ApiError(400, "previous_response_not_found", message, param="previous_response_id")
        return [*json.loads(stored.input_items), *json.loads(stored.body)["output"]]

    def item(self, item_id: str) -> Resource:
        """Return one item of a response: an item's id contains its response's."""
        key = item_id.partition("_")[2].partition("_")[0]
        stored = self._store.get(self.owner, f"resp_{key}")
        items = [] if stored is None else self.conversation(stored.response_id)
        for item in items:
            if item["id"] == item_id:
                return item
        raise not_found("Item", item_id, "input")

    def keep(self, response: StoredResponse) -> bool:
        return self._store.put(self.owner, response)

    def body(self, response_id: str) -> dict[str, Any]:
        """Return a response, whether it has ended or not."""
        running = self._background.get(self.owner, response_id)
        if running is not None:
            return running.snapshot()
        body: dict[str, Any] = json.loads(self.get(response_id).body)
        return body

    async def cancel(self, response_id: str) -> None:
        """End a response that is made in the background."""
        await self._background.cancel(self.owner, response_id)

    def delete(self, response_id: str) -> None:
        if not self._store.delete(self.owner, response_id):
            raise not_found("Response", response_id)


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    return ApiError(404, "not_found", f"{kind} with id '{name[:128]}' not found.", param=param)

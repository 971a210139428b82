"""`/v1/responses`: making a response, and what can be done with one that is kept."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from server.generation.checks import served_model
from server.generation.request_run import CACHE_POLICY_HEADER, RequestRun
from server.http.errors import ApiError, invalid_value, unsupported_parameter
from server.http.jsontext import ascii_json
from server.http.record import RequestRecord
from server.protocol.responses import (
    DeletedResponse,
    InputTokens,
    ResponseItemList,
    ResponseObject,
    ResponsesRequest,
)
from server.responses.answer import Resource, ResponseAnswer
from server.responses.background import BackgroundResponses
from server.responses.store import ResponseStore, StoredResponse
from server.routes.generation import GenerationResponse
from server.services import Services
from server.text.renderer import RenderError

PATH = "/v1/responses"


class OwnedArchive:
    """What one owner has in the store."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses, owner: str) -> None:
        self._store, self._background, self.owner = store, background, owner

    def get(self, response_id: str) -> StoredResponse:
        stored = self._store.get(self.owner, response_id)
        if stored is None:
            raise _not_found("Response", response_id, None)
        return stored

    def conversation(self, response_id: str) -> list[Resource]:
        if self._background.get(self.owner, response_id) is not None:
            raise invalid_value(f"The response '{response_id}' has not ended.", "previous_response_id")
        stored = self._store.get(self.owner, response_id)
        if stored is None:
            raise _not_found("Previous response", response_id, "previous_response_id")
        return [*json.loads(stored.input_items), *json.loads(stored.body)["output"]]

    def item(self, item_id: str) -> Resource:
        """Return one item of a response, whose id has the response's own in it."""
        stored = self._store.get(self.owner, f"resp_{item_id.partition('_')[2].partition('_')[0]}")
        items = [] if stored is None else self.conversation(stored.response_id)
        found: Resource | None = next((item for item in items if item["id"] == item_id), None)
        if found is None:
            raise _not_found("Item", item_id, "input")
        return found

    def keep(self, response: StoredResponse) -> bool:
        return self._store.put(self.owner, response)

    def body(self, response_id: str) -> dict[str, Any]:
        """Return a response, whether it has ended or not."""
        answer = self._background.get(self.owner, response_id)
        body: dict[str, Any] = json.loads(self.get(response_id).body) if answer is None else answer.snapshot()
        return body

    async def cancel(self, response_id: str) -> None:
        """End a response that is made in the background."""
        await self._background.cancel(self.owner, response_id)

    def delete(self, response_id: str) -> None:
        if not self._store.delete(self.owner, response_id):
            raise _not_found("Response", response_id, None)


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    store, background = ResponseStore(services.settings.storage), BackgroundResponses()
    services.metrics.watch_responses(store)

    def archive_of(request: Request) -> OwnedArchive:
        return OwnedArchive(store, background, RequestRecord.of(request.scope).tenant)

    _route_making(routes, services, background, archive_of)
    _route_kept(routes, archive_of)
    return routes


def _route_making(
    routes: APIRouter,
    services: Services,
    background: BackgroundResponses,
    archive_of: Callable[[Request], OwnedArchive],
) -> None:
    @routes.post(PATH, response_model=ResponseObject)
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        model = served_model(body.model, services.settings)
        _check(body, services)
        archive = archive_of(request)
        answer = ResponseAnswer(body, model, services.settings, archive)
        if not body.background:
            return GenerationResponse(services, answer)
        await background.start(
            archive.owner,
            answer,
            RequestRun(
                services, answer, RequestRecord.of(request.scope), request.headers.get(CACHE_POLICY_HEADER)
            ),
        )
        return _json(answer.snapshot())

    @routes.post(PATH + "/input_tokens")
    async def count_input_tokens(request: Request, body: ResponsesRequest) -> InputTokens:
        answer = ResponseAnswer(
            body, served_model(body.model, services.settings), services.settings, archive_of(request)
        )
        with services.client.reserve(0):
            try:
                [prompt] = await answer.render(services.renderer)
            except RenderError as error:
                raise invalid_value(str(error), answer.prompt_param) from error
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def _route_kept(routes: APIRouter, archive_of: Callable[[Request], OwnedArchive]) -> None:
    @routes.get(PATH + "/{response_id}", response_model=ResponseObject)
    async def retrieve_response(request: Request, response_id: str, stream: bool = False) -> Response:
        body = archive_of(request).body(response_id)
        if stream:
            raise unsupported_parameter("stream", "is not supported for a response that was made already")
        return _json(body)

    @routes.delete(PATH + "/{response_id}")
    async def delete_response(request: Request, response_id: str) -> DeletedResponse:
        archive = archive_of(request)
        await archive.cancel(response_id)
        archive.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post(PATH + "/{response_id}/cancel", response_model=ResponseObject)
    async def cancel_response(request: Request, response_id: str) -> Response:
        archive = archive_of(request)
        if not archive.body(response_id)["background"]:
            raise invalid_value("Only responses that were made with 'background' can be cancelled.", None)
        await archive.cancel(response_id)
        return _json(archive.body(response_id))

    @routes.get(PATH + "/{response_id}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ResponseItemList:
        items: list[dict[str, Any]] = json.loads(archive_of(request).get(response_id).input_items)
        return _page(items if order == "asc" else items[::-1], limit, after)


def _check(body: ResponsesRequest, services: Services) -> None:
    limit, keeps = services.settings.limits.max_tools, services.settings.storage.max_responses > 0
    if len(body.tools or ()) > limit:
        raise invalid_value(
            f"'tools' is limited to {limit} by this server, got {len(body.tools or ())}.", "tools"
        )
    for param, is_asked in (("store", body.store), ("background", body.background)):
        if is_asked and not keeps:
            raise unsupported_parameter(param, "is not supported: this server keeps no responses")

    try:
        ascii_json(body.echo())
    except (ValueError, RecursionError) as error:
        raise invalid_value(
            "The request has a value that no response can repeat: a number that is none, or too deep a schema.",
            None,
        ) from error


def _json(body: Mapping[str, object]) -> Response:
    return Response(ascii_json(body), media_type="application/json")


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> ResponseItemList:
    start = 0
    if after is not None:
        start = next((number for number, item in enumerate(items, start=1) if item["id"] == after), -1)
        if start < 0:
            raise _not_found("Item", after, "after")
    page = items[start : start + limit]
    ids = [str(item["id"]) for item in page] or [""]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": start + limit < len(items),
    }


def _not_found(what: str, name: str, param: str | None) -> ApiError:
    status, code = (
        (400, "previous_response_not_found") if param == "previous_response_id" else (404, "not_found")
    )
    return ApiError(status, code, f"{what} with id '{name[:128]}' not found.", param=param)

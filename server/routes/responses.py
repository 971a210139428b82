"""`/v1/responses`: creation of a response, and the operations on a stored one."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from server.generation.admission import check_count, served_model
from server.generation.path import Call, without_generation
from server.generation.response import GenerationResponse
from server.http.errors import invalid_value, unsupported_parameter
from server.http.json_response import ascii_json, json_response
from server.http.record import RequestRecord
from server.http.streams import NamedEventStream, described
from server.protocol.responses import (
    DeletedResponse,
    InputTokens,
    ResponseItemList,
    ResponseObject,
    ResponsesRequest,
)
from server.responses.archive import OwnedArchive, not_found
from server.responses.background import BackgroundResponses
from server.responses.model_response import ModelResponse
from server.services import Services
from server.text.renderer import RenderError

PATH = "/v1/responses"


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    store = services.state.responses
    background = BackgroundResponses(store, services.endings)
    services.metrics.watch_responses(store)

    def archive_of(request: Request) -> OwnedArchive:
        return OwnedArchive(store, background, RequestRecord.of(request.scope).tenant)

    _add_creation_routes(routes, services, background, archive_of)
    _add_stored_routes(routes, archive_of)
    return routes


def _add_creation_routes(
    routes: APIRouter,
    services: Services,
    background: BackgroundResponses,
    archive_of: Callable[[Request], OwnedArchive],
) -> None:
    def response_of(request: Request, body: ResponsesRequest) -> ModelResponse:
        model = served_model(body.model, services.settings)
        spec = services.client.spec
        return ModelResponse(body, model, services.settings, archive_of(request), spec)

    @routes.post(PATH, response_model=ResponseObject, responses=described(NamedEventStream))
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        response = response_of(request, body)
        _check(body, services)
        if not body.background:
            return GenerationResponse(services, response.task())
        record = RequestRecord.of(request.scope)
        await background.start(
            record.tenant, response, Call(response.task(), record, request.headers, services)
        )
        return json_response(response.snapshot())

    @routes.post(PATH + "/input_tokens")
    async def count_input_tokens(request: Request, body: ResponsesRequest) -> InputTokens:
        task = response_of(request, body).task()
        try:
            rendered = await without_generation(request, services, lambda: task.render(services.renderer))
        except RenderError as error:
            raise invalid_value(str(error), task.prompt_param) from error
        (prompt,) = rendered.prompts
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}


def _add_stored_routes(routes: APIRouter, archive_of: Callable[[Request], OwnedArchive]) -> None:
    @routes.get(PATH + "/{response_id}", response_model=ResponseObject)
    async def retrieve_response(request: Request, response_id: str, stream: bool = False) -> Response:
        body = await archive_of(request).body(response_id)
        if stream:
            raise unsupported_parameter("stream", "is not supported for a stored response")
        return json_response(body)

    @routes.delete(PATH + "/{response_id}")
    async def delete_response(request: Request, response_id: str) -> DeletedResponse:
        archive = archive_of(request)
        # A background response is stored only at its end, so end it first.
        await archive.cancel(response_id)
        await archive.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post(PATH + "/{response_id}/cancel", response_model=ResponseObject)
    async def cancel_response(request: Request, response_id: str) -> Response:
        archive = archive_of(request)
        if not (await archive.body(response_id))["background"]:
            raise invalid_value("Only responses created with 'background': true can be cancelled.", None)
        await archive.cancel(response_id)
        return json_response(await archive.body(response_id))

    @routes.get(PATH + "/{response_id}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ResponseItemList:
        stored = await archive_of(request).get(response_id)
        items: list[dict[str, Any]] = json.loads(stored.input_items)
        return _page(items if order == "asc" else items[::-1], limit, after)


def _check(body: ResponsesRequest, services: Services) -> None:
    """Check limits and the server's support of `store` and `background`. Raises `ApiError`."""
    stores_responses = services.settings.storage.max_responses > 0
    check_count("tools", len(body.functions), services.settings.limits.max_tools)
    for param, is_requested in (("store", body.store), ("background", body.background)):
        if is_requested and not stores_responses:
            raise unsupported_parameter(param, "is not supported: this server does not store responses")
    # A response repeats the request's parameters: find out that they cannot be encoded before generating.
    try:
        ascii_json(body.echo())
    except (ValueError, RecursionError) as error:
        message = (
            "The response could not repeat a value of the request: it contains NaN, an infinity or a schema "
            "that is nested too deeply."
        )
        raise invalid_value(message, None) from error


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> ResponseItemList:
    """Return the page of at most `limit` items after the item with id `after`. Raises `ApiError`."""
    start = 0
    if after is not None:
        start = next((index for index, item in enumerate(items, start=1) if item["id"] == after), -1)
        if start < 0:
            raise not_found("Item", after, "after")
    page = items[start : start + limit]
    ids = [str(item["id"]) for item in page] or [""]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": start + limit < len(items),
    }

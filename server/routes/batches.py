"""`/v1/batches`: creation, lists and cancellation. Each API key has access to its own batches only."""

from typing import Any, Final, cast

from fastapi import APIRouter, Request

from server.batches.batch import Batch, Usage
from server.batches.dispatch import ENDPOINTS
from server.batches.service import enabled, up_to_date
from server.http.pages import page
from server.http.record import RequestRecord
from server.protocol.batches import BatchList, BatchObject, BatchRequest, BatchUsage
from server.services import Services

DEFAULT_LISTED: Final = 20
MAX_LISTED: Final = 100


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    batches = services.batches

    @routes.post("/v1/batches")
    async def create_batch(request: Request, body: BatchRequest) -> BatchObject:
        endpoints = request.app.state.paths & set(ENDPOINTS)
        owner = RequestRecord.of(request.scope).tenant
        return _batch_object(await enabled(batches).store.create(body, owner, endpoints))

    @routes.get("/v1/batches")
    async def list_batches(request: Request) -> BatchList:
        owned = (await up_to_date(batches)).store.of(RequestRecord.of(request.scope).tenant)
        shown, has_more = page(request, owned, default=DEFAULT_LISTED, max_limit=MAX_LISTED)
        listed: BatchList = {
            "object": "list",
            "data": [_batch_object(batch) for batch in shown],
            "has_more": has_more,
        }
        if not shown:
            return listed
        return {**listed, "first_id": shown[0].id, "last_id": shown[-1].id}

    @routes.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> BatchObject:
        owner = RequestRecord.of(request.scope).tenant
        return _batch_object((await up_to_date(batches)).store.get(batch_id, owner))

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> BatchObject:
        owner = RequestRecord.of(request.scope).tenant
        return _batch_object(await enabled(batches).store.cancel(batch_id, owner))

    return routes


def _batch_object(batch: Batch) -> BatchObject:
    """Return a batch as clients see it. Fields without a value are left out, except for the metadata."""
    # The ids of the output files are set before the files exist; clients see them at the end only.
    has_files = batch.status.has_ended
    errors = [
        {"code": error.code, "message": error.message, "line": error.line, "param": error.param}
        for error in batch.errors
    ]
    fields: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if has_files else None,
        "error_file_id": batch.error_file_id if has_files else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{f"{status}_at": int(time) for status, time in batch.times.items()},
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "usage": _usage(batch.usage),
    }
    present = {name: value for name, value in fields.items() if value is not None}
    return cast(BatchObject, present | {"metadata": batch.metadata})


def _usage(usage: Usage) -> BatchUsage:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }

"""A batch's line on the way that every request takes: through the server's own routes, without a socket."""

import json
import uuid
from dataclasses import dataclass
from typing import Any, Final

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from server.batches.lines import Task
from server.http.record import RequestRecord

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
TRY_AGAIN: Final = (429, 503)  # no answer to the request: the server is full, loading or shutting down


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    request_id: str
    body: Any
    retry_after: float  # seconds

    @property
    def is_answer(self) -> bool:
        return self.status not in TRY_AGAIN


class Dispatcher:
    """Sends to `app`, which has the routes and tells errors as clients see them, but asks for no key and knows no rate limits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(self, endpoint: str, task: Task, owner: str) -> Reply:
        """Return what this owner's client would get. Cancelling it is a client's going away."""
        record = RequestRecord(uuid.uuid4().hex, tenant=owner, is_background=True)

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            record.attach(scope)
            await self._app(scope, receive, send)

        headers = {"content-type": "application/json"}
        request = httpx.Request(
            "POST", f"http://batch{endpoint}", content=json.dumps(task.body), headers=headers
        )
        response = await httpx.ASGITransport(recorded, raise_app_exceptions=False).handle_async_request(
            request
        )
        body = json.loads(await response.aread())
        return Reply(
            response.status_code, record.request_id, body, float(response.headers.get("retry-after", 1))
        )

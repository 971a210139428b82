"""Sends a batch's lines through the server's own routes, without a socket."""

import json
import uuid
from dataclasses import dataclass
from typing import Any, Final

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from server.batches.lines import Task
from server.http.record import RequestRecord

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Statuses that do not answer the request: a limit is reached, the server is full, loading or shutting down.
TRY_AGAIN: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    request_id: str
    body: Any
    retry_after: float  # seconds
    may_be_retried: bool = True  # False: the server would refuse it for ever

    @property
    def is_answer(self) -> bool:
        return self.status not in TRY_AGAIN or not self.may_be_retried


class Dispatcher:
    """Sends requests to `app`, which has the routes, error handlers and rate limits, but no authentication.

    The request that created the batch was authenticated.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def send(self, endpoint: str, task: Task, owner: str) -> Reply:
        """Return the reply that a client of `owner` would get. Cancelling has the effect of a client's
        disconnect.
        """
        record = RequestRecord(uuid.uuid4().hex, tenant=owner, is_background=True)

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            record.attach(scope)
            await self._app(scope, receive, send)

        request = httpx.Request(
            "POST",
            f"http://batch{endpoint}",
            content=json.dumps(task.body),
            headers={"content-type": "application/json"},
        )
        # An exception in `app` becomes a reply of status 500: it fails this line, not the whole batch.
        transport = httpx.ASGITransport(recorded, raise_app_exceptions=False)
        response = await transport.handle_async_request(request)
        body = json.loads(await response.aread())
        headers = response.headers
        retry_after = float(headers.get("retry-after", 1))
        may_be_retried = headers.get("x-should-retry") != "false"
        return Reply(response.status_code, record.request_id, body, retry_after, may_be_retried)

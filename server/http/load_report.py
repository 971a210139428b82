"""The load of this server in the headers of its answers, for a gateway that balances by it.

The format is ORCA's (Open Request Cost Aggregation), with vLLM's names.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORMAT_HEADER: Final = "endpoint-load-metrics-format"
HEADER: Final = "endpoint-load-metrics"


class LoadReport:
    """Middleware that adds the header to the answers of requests that name a format, TEXT or JSON.

    `load` returns numbers by name. They are those of the moment when the answer begins.
    """

    def __init__(self, app: ASGIApp, load: Callable[[], Mapping[str, float]]) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (name := Headers(scope=scope).get(FORMAT_HEADER)) is None:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start" and (report := self._report(name)) is not None:
                MutableHeaders(scope=message)[HEADER] = report
            await send(message)

        await self._app(scope, receive, send_with_load)

    def _report(self, name: str) -> str | None:
        match name.upper():
            case "TEXT":
                values = ", ".join(
                    f"named_metrics.{metric}={value}" for metric, value in self._load().items()
                )
                return f"TEXT {values}"
            case "JSON":
                return f"JSON {json.dumps({'named_metrics': dict(self._load())})}"
        return None

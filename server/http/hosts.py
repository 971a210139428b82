"""The names under which a server may be called, against pages that point their own name at this machine.

A page may let its name lead to 127.0.0.1 once it is loaded (DNS rebinding). The browser then takes the server
for the page's own. The Host header still has the page's name, which this module refuses.
"""

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.error_shapes import error_response
from server.http.errors import ApiError
from server.options.settings import ServerSettings


def is_this_machine(name: str) -> bool:
    """Return whether a name or an address, without a port, leads to the machine itself everywhere."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def allowed_hosts(settings: ServerSettings) -> tuple[str, ...] | None:
    """Return the names, beside this machine's own, under which the server may be called; None for all."""
    named = settings.api.allowed_hosts
    is_open = not named and (bool(settings.api_keys) or not is_this_machine(settings.host))
    return None if is_open or "*" in named else named


class HostGuard:
    """Middleware that answers 403 to a request for another host, and 400 to one with several Host headers or
    of HTTP/0.9, which has none.

    Allowed are this machine's own names and those in `allowed`; with None, all. A request without a Host
    header is no browser's.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str] | None) -> None:
        self._app = app
        self._allowed = None if allowed is None else frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            error = self._refusal(hosts, scope["http_version"])
            if error is not None:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, hosts: list[bytes], version: str) -> ApiError | None:
        if version == "0.9":
            return ApiError(400, "invalid_http", "The request names no version of HTTP.")
        if len(hosts) > 1:
            return ApiError(400, "invalid_http", "The request has more than one Host header.")
        if self._allowed is None or not hosts:
            return None
        name = _name_of(hosts[0].decode("latin-1"))
        if name in self._allowed or is_this_machine(name):
            return None
        message = (
            f"This server is not called {name[:64]!r}. Without keys, it answers to this machine's own names "
            "only; --allowed-hosts adds others."
        )
        return ApiError(403, "host_not_allowed", message)


def _name_of(host: str) -> str:
    """Return a Host header's name without its port, in lower case."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".")

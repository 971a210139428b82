"""API keys: who may call. Decided on the path that is routed on, and denied unless the path is one of those that are open."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import invalid_api_key
from server.http.record import RequestRecord
from server.options.keys import digest_name, key_digest

MISSING_KEY = (
    "You did not provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
)
WRONG_KEY = "Incorrect API key provided."


class KeyRing:
    """The keys that are accepted, held as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(key_digest(key.encode()) for key in keys)

    def name_of(self, key: bytes) -> str | None:
        """Return the name of this key if it is one of them, in a time that depends on neither the key nor which one it is."""
        digest = key_digest(key)
        is_known = any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419 (a generator would stop at the first)
        return digest_name(digest) if is_known else None


class KeyGuard:
    """Middleware that answers 401 to whoever has no key."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        name = None if key is None else self._keys.name_of(key)
        if name is not None:
            RequestRecord.of(scope).tenant = name
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await invalid_api_key(MISSING_KEY if key is None else WRONG_KEY).response()(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    """Return the key in the request's one Authorization header; several are as good as none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and key else None

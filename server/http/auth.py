"""API keys. A request without a valid key is refused unless its path, after aliases, is open."""

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import invalid_api_key
from server.http.record import RequestRecord, tenant
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
        """Return the name of an accepted key, or None.

        The time depends neither on `key` nor on which one it matches.
        """
        digest = key_digest(key)
        # A list, because `any` over a generator stops at the first match, and its time would reveal the key's
        # index.
        is_known = any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419
        return digest_name(digest) if is_known else None


class KeyGuard:
    """Middleware that answers 401 to a request without a valid key."""

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
            tenant.set(name)
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await invalid_api_key(MISSING_KEY if key is None else WRONG_KEY).response()(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    """Return the key of the request's only Authorization header, or None. Several headers count as none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and key else None

"""API keys. A request without a valid key is refused unless its path, after aliases, is open."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.error_shapes import error_response
from server.http.errors import invalid_api_key
from server.http.record import RequestRecord, tenant

MISSING_KEY = (
    "You did not provide an API key. Send it in a header: 'Authorization: Bearer YOUR_KEY' "
    "or 'x-api-key: YOUR_KEY'."
)
WRONG_KEY = "Incorrect API key provided."


def key_name(key: str) -> str:
    """Return the name of a key in logs and queues: the first 12 digits of its hash."""
    return _digest_name(_digest(key.encode()))


class KeyRing:
    """The keys that are accepted, held as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def name_of(self, key: bytes) -> str | None:
        """Return the name of an accepted key, or None.

        The time depends neither on `key` nor on which one it matches.
        """
        digest = _digest(key)
        # A list, because `any` over a generator stops at the first match, and its time would reveal the key's
        # index.
        is_known = any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419
        return _digest_name(digest) if is_known else None


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
        keys = _keys(scope)
        names = [name for key in keys if (name := self._keys.name_of(key)) is not None]
        if names:
            RequestRecord.of(scope).tenant = names[0]
            tenant.set(names[0])
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = invalid_api_key(WRONG_KEY if keys else MISSING_KEY)
            await error_response(error, scope)(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _digest_name(digest: bytes) -> str:
    return digest.hex()[:12]


def _keys(scope: Scope) -> list[bytes]:
    """Return the keys of the request: OpenAI's `Authorization` first, then Anthropic's `x-api-key`.

    Several headers of one name count as none.
    """
    scheme, _, bearer = _only_header(scope, b"authorization").partition(b" ")
    keys = (bearer.strip() if scheme.lower() == b"bearer" else b"", _only_header(scope, b"x-api-key"))
    return [key for key in keys if key]


def _only_header(scope: Scope, wanted: bytes) -> bytes:
    """Return the value of a header; nothing if there is none, or several."""
    values = [value for name, value in scope["headers"] if name == wanted]
    return values[0].strip() if len(values) == 1 else b""

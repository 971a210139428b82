"""JSON bodies in ASCII."""

import json
from collections.abc import Mapping

from starlette.responses import Response


def ascii_json(payload: Mapping[str, object]) -> bytes:
    """Return `payload` as JSON in ASCII. Raises ValueError for NaN and infinities.

    ASCII carries lone surrogates, which a message may quote from a request, and UTF-8 cannot. It also has
    none of the line separators of Unicode, at which some readers of server-sent events split lines.
    """
    return json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_response(
    payload: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response whose body is `payload`."""
    return Response(ascii_json(payload), status, headers=headers, media_type="application/json")

"""JSON bodies in ASCII."""

import json
from collections.abc import Mapping

from starlette.responses import Response


def ascii_json(payload: Mapping[str, object]) -> bytes:
    """Return `payload` as JSON in ASCII. Raises ValueError for NaN and infinities.

    In ASCII, lone surrogates are escaped. A message may quote them from a request, but UTF-8 cannot encode
    them. ASCII also lacks Unicode's line separators, at which some readers of server-sent events split lines.
    """
    return json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_response(
    payload: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response whose body is `payload`."""
    return Response(ascii_json(payload), status, headers=headers, media_type="application/json")

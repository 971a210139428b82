"""JSON as it goes out."""

import json
from collections.abc import Mapping


def ascii_json(payload: Mapping[str, object]) -> bytes:
    """Return `payload` as JSON in ASCII: no byte of it can be taken for a line's end by a reader of server-sent events."""
    return json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")

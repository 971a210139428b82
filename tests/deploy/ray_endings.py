"""What the ingress makes of a replica's death, in Ray's own environment: `test_ray` reads what it prints."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from app import _pieces
from ray.exceptions import RayError

START = {"headers": [(b"content-type", b"text/event-stream")]}
DONE = {"body": b"data: [DONE]\n\n", "more_body": True}
END = {"body": b"", "more_body": False}


class Dying:
    """An answer with one more part, after which its replica dies."""

    def __init__(self, part: list[Mapping[str, Any]]) -> None:
        self._part = part
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[list[Mapping[str, Any]]]:
        yield self._part
        raise RayError

    def cancel(self) -> None:
        self.is_cancelled = True


async def body(part: list[Mapping[str, Any]]) -> list[object]:
    answer = Dying(part)
    text = b"".join([piece async for piece in _pieces(answer, [DONE], START)]).decode()
    return [text.count("[DONE]"), text.count("replica_lost"), answer.is_cancelled]


if __name__ == "__main__":
    parts: dict[str, list[Mapping[str, Any]]] = {
        "amid": [DONE],
        "at the end": [DONE, END],
        "after the last text": [END],
    }
    print(json.dumps({name: asyncio.run(body(part)) for name, part in parts.items()}))

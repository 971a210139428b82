"""Reading server-sent events as they lie on the wire."""

import json
from collections.abc import Iterator
from typing import Any

import httpx


def blocks(response: httpx.Response) -> Iterator[str]:
    """Yield the text between blank lines, uninterpreted."""
    rest = ""
    for text in response.iter_text():
        rest += text
        *whole, rest = rest.split("\n\n")
        yield from whole
    assert rest == "", f"a stream ended inside an event: {rest!r}"


def data(response: httpx.Response) -> Iterator[Any]:
    """Yield the JSON of a stream that ends as it should."""
    lines = [block for block in blocks(response) if not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines.pop() == "data: [DONE]"
    yield from (json.loads(line.removeprefix("data: ")) for line in lines)

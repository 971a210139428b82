"""What tests of files and batches share: inputs, settings of a folder, a clock that is set by hand."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import openai

from server.batches.limits import BatchLimits
from server.batches.service import Batches
from server.options.settings import BatchOptions
from tests.server.serving import RunningServer

CHAT: Final = "/v1/chat/completions"
DAY: Final = 24 * 3600


class Clock:
    """Unix seconds that pass on request."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def now(self) -> float:
        return self.time


def batches_in(folder: Path, now: Callable[[], float] | None = None, **changes: Any) -> Batches:
    """Return the files and batches of a folder, with these changes of options and limits."""
    options = BatchOptions(**{key: changes.pop(key) for key in BatchOptions.model_fields if key in changes})
    return Batches(folder / "kept", options, BatchLimits(**changes), now)


def line(custom_id: str, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Hello {custom_id}"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": chat | body}


def jsonl(lines: Iterable[object]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def client(server: RunningServer, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


def answers(content: bytes) -> dict[str, Any]:
    """Return the lines of an output or error file by custom id; each id is there once."""
    lines = [json.loads(each) for each in content.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return by_id

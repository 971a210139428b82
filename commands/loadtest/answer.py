"""One streamed answer, read from the bytes of its response and the moments when they came."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commands.shared.text import shortened


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Moments are in seconds of one clock; `contents` are those at which a chunk with text came.

    `num_input_tokens` and `num_output_tokens` are what the server says in `usage`.
    """

    sent: float
    contents: tuple[float, ...]
    ended: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first text. None if there was no text, as when every token is a control token."""
        return self.contents[0] - self.sent if self.contents else None

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last byte."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first. None for answers of one token and for those without text."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks, each of which may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.contents)]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that brought no complete answer: `reason` in a few words that are alike for alike failures, `detail` as it was told."""

    reason: str
    detail: str = ""


def read_answer(sent: float, ended: float, received: Iterable[tuple[float, bytes]]) -> Answer | Failure:
    """Return what a stream of server-sent events says, from pieces of it and the moments at which they came."""
    contents, usage, is_finished = list[float](), dict[str, Any](), False
    for moment, data in _events(received):
        if data == b"[DONE]":
            continue
        try:
            event = json.loads(data)
            if event.get("error"):
                return Failure("error in stream", shortened(json.dumps(event["error"])))
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                is_finished |= choice.get("finish_reason") is not None
                if _has_content(choice):
                    contents.append(moment)
        except (ValueError, AttributeError):
            return Failure("malformed stream", shortened(data.decode(errors="replace")))
    if not is_finished:
        return Failure("stream ended early", "no choice came to its finish_reason")
    try:
        return Answer(
            sent, tuple(contents), ended, int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        )
    except (KeyError, TypeError, ValueError):
        return Failure(
            "no usage in stream",
            "the server told no token counts, though asked by stream_options.include_usage",
        )


def _events(received: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event and the moment when its line was complete. Comments and other fields are left out."""
    rest = b""
    for moment, piece in received:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()


def _has_content(choice: dict[str, Any]) -> bool:
    if "delta" not in choice:
        return bool(choice.get("text"))
    delta = choice["delta"] or {}
    return any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    )

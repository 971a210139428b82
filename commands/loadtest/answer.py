"""One streamed answer and its latencies, parsed from the bytes of a response and their times of arrival."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commands.shared.text import shortened


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. All times are in seconds of one clock; `contents` has one for each chunk with text.

    `num_input_tokens` and `num_output_tokens` come from the server's `usage`.
    """

    sent: float
    contents: tuple[float, ...]
    ended: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def ttft(self) -> float | None:
        """Time to first token: from sending to the first text. None for an answer without text."""
        return self.contents[0] - self.sent if self.contents else None

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last byte."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first. None for an answer of one token or without text."""
        if self.ttft is None or self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks. A chunk may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.contents)]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without a complete answer.

    `reason` is a short text that equal failures share; `detail` is the server's or the system's own message.
    """

    reason: str
    detail: str = ""


def read_answer(sent: float, ended: float, received: Iterable[tuple[float, bytes]]) -> Answer | Failure:
    """Parse a stream of server-sent events. `received` has its pieces, each with its time of arrival."""
    contents: list[float] = []
    usage: dict[str, Any] = {}
    is_finished = False
    for time, data in _events(received):
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
                    contents.append(time)
        except (ValueError, AttributeError):
            return Failure("malformed stream", shortened(data.decode(errors="replace")))
    if not is_finished:
        return Failure("stream ended early", "no choice has a finish_reason")
    try:
        return Answer(
            sent, tuple(contents), ended, int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        )
    except (KeyError, TypeError, ValueError):
        return Failure(
            "no usage in stream",
            "the server sent no token counts, although stream_options.include_usage was set",
        )


def _events(received: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event and the time when its line was complete.

    Skip comments and other fields.
    """
    rest = b""
    for time, piece in received:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time, line.removeprefix(b"data:").strip()


def _has_content(choice: dict[str, Any]) -> bool:
    if "delta" not in choice:
        return bool(choice.get("text"))
    delta = choice["delta"] or {}
    return any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    )

"""The requests of a soak: all kinds that the API has, valid and invalid, drawn at random from a seed."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

WORDS: Final = (
    "river",
    "seven",
    "copper",
    "harbour",
    "the code of",
    "winter",
    "is",
    "and then",
    "locksmith",
    "a letter from",
    "Ravi",
    "41",
)
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Final = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA, "strict": True}}
MAX_TOKENS: Final = 48


@dataclass(frozen=True, slots=True)
class Request:
    """One request, which costs the engine `num_sequences` sequences of at most `max_tokens` each."""

    kind: str
    path: str
    body: Mapping[str, Any] | bytes
    num_sequences: int = 0
    max_tokens: int = 0

    @property
    def is_stream(self) -> bool:
        return isinstance(self.body, Mapping) and bool(self.body.get("stream"))


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def _max_tokens(rng: random.Random) -> int:
    return rng.randint(1, MAX_TOKENS)


def _chat(
    rng: random.Random, kind: str = "chat", num_words: tuple[int, int] = (3, 60), **options: Any
) -> Request:
    messages = [{"role": "user", "content": words(rng, *num_words)}]
    limit = _max_tokens(rng)
    n = rng.choice((1, 1, 1, 2, 4))
    body = {"messages": messages, "max_tokens": limit, "n": n, "temperature": rng.choice((0, 1)), **options}
    return Request(kind, "/v1/chat/completions", body, n, limit)


def _streamed_chat(rng: random.Random) -> Request:
    return _chat(rng, "chat, streamed", stream=True, stream_options={"include_usage": True})


def _long_chat(rng: random.Random) -> Request:
    return _chat(rng, "chat, long prompt", (500, 900), stream=True, stream_options={"include_usage": True})


def _structured_chat(rng: random.Random) -> Request:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    return _chat(rng, "chat, structured", response_format=schema)


def _tool_chat(rng: random.Random) -> Request:
    return _chat(rng, "chat, tools", tools=[TOOL], tool_choice="required")


def _completion(rng: random.Random) -> Request:
    limit = _max_tokens(rng)
    prompts = [words(rng, 1, 40) for _ in range(rng.choice((1, 1, 3)))]
    n = rng.choice((1, 2))
    body = {"prompt": prompts, "max_tokens": limit, "n": n, "logprobs": rng.choice((None, 3))}
    return Request("completion", "/v1/completions", body, n * len(prompts), limit)


def _response(rng: random.Random) -> Request:
    limit = max(16, _max_tokens(rng))  # OpenAI's minimum
    stream = rng.random() < 0.5
    body = {
        "input": words(rng, 3, 60),
        "max_output_tokens": limit,
        "store": rng.random() < 0.5,
        "stream": stream,
    }
    return Request("response, streamed" if stream else "response", "/v1/responses", body, 1, limit)


def _background_response(rng: random.Random) -> Request:
    limit = rng.randint(16, MAX_TOKENS)
    body = {"input": words(rng, 3, 60), "max_output_tokens": limit, "background": True}
    return Request("response, background", "/v1/responses", body, 1, limit)


def _embedding(rng: random.Random) -> Request:
    texts = [words(rng, 1, 60) for _ in range(rng.randint(1, 4))]
    return Request("embedding", "/v1/embeddings", {"input": texts}, len(texts))


def _tokenize(rng: random.Random) -> Request:
    return Request("tokenize", "/tokenize", {"prompt": words(rng, 1, 60)})


def _wrong(rng: random.Random) -> Request:
    path = rng.choice(
        ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/nowhere")
    )
    bodies: tuple[Mapping[str, Any] | bytes, ...] = (
        b"{",
        b"\xff\xfe{}",
        b"[" * 5000,
        {},
        {"messages": [], "prompt": 3, "input": None},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "model": 7},
        {"model": "another", "prompt": "x"},
    )
    return Request("wrong", path, rng.choice(bodies))


KINDS: Final[Mapping[Callable[[random.Random], Request], int]] = {
    _chat: 4,
    _streamed_chat: 6,
    _long_chat: 1,
    _structured_chat: 2,
    _tool_chat: 2,
    _completion: 4,
    _response: 4,
    _background_response: 1,
    _embedding: 2,
    _tokenize: 1,
    _wrong: 3,
}


def next_request(rng: random.Random) -> Request:
    """Return a request of a random kind; common kinds are more likely."""
    (make,) = rng.choices(tuple(KINDS), weights=tuple(KINDS.values()))
    return make(rng)


def batch_lines(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return the lines of a batch's file. One in ten is invalid."""
    lines = []
    for index in range(count):
        body = {"messages": [{"role": "user", "content": words(rng, 3, 40)}], "max_tokens": _max_tokens(rng)}
        if rng.random() < 0.1:
            body["temperature"] = 99
        lines.append({"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body})
    return lines

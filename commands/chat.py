"""The sub-command `chat`: a conversation with a running server, in the terminal."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from backends.options import Count, OptionGroup, Shown, Text
from commands.shared.option_types import ApiKey, Url
from server.options.command_line import add_options, groups_of, read_options

if TYPE_CHECKING:
    import httpx

_HELP = "/new begins a new conversation, /quit or Ctrl-D ends. Ctrl-C stops an answer."
_CONNECT_LIMIT = 10.0  # seconds


class ChatOptions(OptionGroup):
    """The server, and how it answers."""

    title: ClassVar[str] = "Chat"
    prefix: ClassVar[str] = "SNAPSERVE_CHAT_"

    base_url: Url = "http://127.0.0.1:8000"
    """The server."""
    api_key: Annotated[ApiKey | None, Shown(default="none")] = None
    """Its key."""
    model: Annotated[Text | None, Shown(default="the server's")] = None
    """Name of the model."""
    system: Annotated[Text | None, Shown(default="none")] = None
    """System prompt."""
    temperature: Annotated[
        float | None,
        Field(ge=0, le=2, allow_inf_nan=False),
        Shown("NUMBER", default="the model's", expected="a number from 0 to 2"),
    ] = None
    """How freely tokens are chosen; 0 takes the most likely."""
    max_tokens: Annotated[Count | None, Shown(default="no limit")] = None
    """Most tokens of an answer."""
    pool: Annotated[Text | None, Shown("NAME", default="by the request's length")] = None
    """Pool of slots."""


@dataclass(frozen=True, slots=True)
class _Options:
    chat: ChatOptions


class ChatError(Exception):
    """The server cannot be reached, or refuses; the message says why."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, groups_of(_Options))


def run(arguments: argparse.Namespace) -> int:
    """Return 0 at the input's end, or 1 if the server cannot be reached. Raises `OptionError`."""
    options = read_options(_Options, arguments, os.environ).chat
    # httpx would slow down every other sub-command.
    import httpx

    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    timeout = httpx.Timeout(None, connect=_CONNECT_LIMIT)
    with httpx.Client(base_url=options.base_url, headers=headers, timeout=timeout, trust_env=False) as http:
        try:
            model = options.model or _first_model(http)
        except ChatError as error:
            print(f"snapserve chat: {error}", file=sys.stderr)
            return 1
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # lines can be edited, and earlier ones called back
            print(f"{model} at {options.base_url}. {_HELP}")
        _converse(http, model, options)
    return 0


def _converse(http: "httpx.Client", model: str, options: ChatOptions) -> None:
    messages: list[dict[str, str]] = []
    for line in _lines():
        if line == "/quit":
            return
        if line == "/new":
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(http, _body(model, messages, options))
        except ChatError as error:
            print(f"snapserve chat: {error}", file=sys.stderr)
            answer = ""
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()  # a question without an answer must not stay before the next one


def _lines() -> Iterator[str]:
    """Yield the lines that a person types, without empty ones."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line:
            yield line


def _body(model: str, messages: list[dict[str, str]], options: ChatOptions) -> dict[str, Any]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    optional = {
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "pool": options.pool,
    }
    return {
        "model": model,
        "messages": [*system, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in optional.items() if value is not None},
    }


def _answer(http: "httpx.Client", body: Mapping[str, Any]) -> str:
    """Print an answer as it comes, and return it. Ctrl-C stops it. Raises `ChatError`."""
    parts: list[str] = []
    try:
        for chunk in _chunks(http, body):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                parts.append(text)
                print(text, end="", flush=True)
            if chunk.get("usage") and sys.stdin.isatty():
                print(f"\n[{_described(chunk['usage'])}]", end="")
    except KeyboardInterrupt:
        print("\n[stopped]", end="")
    print()
    return "".join(parts)


def _chunks(http: "httpx.Client", body: Mapping[str, Any]) -> Iterator[Any]:
    import json

    import httpx

    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_message(response))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ChatError(chunk["error"]["message"])
                yield chunk
    except httpx.HTTPError as error:
        raise ChatError(f"{http.base_url} cannot be reached: {error}") from error


def _first_model(http: "httpx.Client") -> str:
    import httpx

    try:
        response = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatError(f"{http.base_url} cannot be reached: {error}") from error
    if response.status_code != 200:
        raise ChatError(_message(response))
    model: str = response.json()["data"][0]["id"]
    return model


def _message(response: "httpx.Response") -> str:
    """Return the reason of an error."""
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status_code}"
    return message


def _described(usage: Mapping[str, Any]) -> str:
    counts = f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out"
    cache = usage.get("cache")
    if cache is None:  # another server's
        return counts
    return f"{counts}, {cache['kept_tokens']} kept, {cache['evicted_tokens']} evicted"

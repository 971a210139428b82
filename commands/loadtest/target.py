"""A server under load, as its client sees it: how a request is worded and sent, and what came of it."""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx

from commands.loadtest.answer import Answer, Failure, read_answer
from commands.loadtest.config import Address
from commands.loadtest.prompts import Prompt
from commands.loadtest.recording import CONNECT_LIMIT, ConnectionCutError, Recording, exchange, post
from commands.shared.text import shortened

Outcome: TypeAlias = Answer | Failure


class TargetError(Exception):
    """A server that cannot be loaded at all; the message says which and why."""


class Target:
    """One server. `model` is what requests ask for: that of the address, or what the server has told."""

    def __init__(self, address: Address, ignore_eos: bool) -> None:
        self.address = address
        self.model = address.model
        self._url = urlsplit(address.base_url)
        self._extra = {**({"ignore_eos": True} if ignore_eos else {}), **(address.extra_body or {})}
        self._headers = [] if address.api_key is None else [("Authorization", f"Bearer {address.api_key}")]

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless one was named. Raises `TargetError`."""
        if self.model is not None:
            return
        place = self.address.base_url + self.address.models_path
        try:
            # A proxy of the environment's could not reach a loopback address.
            async with httpx.AsyncClient(
                headers=self._headers, timeout=CONNECT_LIMIT, trust_env=False
            ) as client:
                response = await client.get(place)
        except httpx.HTTPError as error:
            raise TargetError(f"{place} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise TargetError(f"{place} answers HTTP {response.status_code} {shortened(response.text)}")
        try:
            self.model = str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{place} names no model; name one by --model") from error

    async def send(self, prompt: Prompt) -> Recording | Failure:
        """Send one request and record its answer to the end."""
        headers = [("Content-Type", "application/json"), ("Accept", "text/event-stream"), *self._headers]
        request = post(self._url, self.address.endpoint, headers, json.dumps(self._body(prompt)).encode())
        try:
            return await exchange(self._url, request)
        except OSError as error:
            return Failure(f"connection: {type(error).__name__}", shortened(str(error)))

    async def ask(self, prompt: Prompt) -> Outcome:
        """Send one request and read its answer."""
        return read_outcome(await self.send(prompt))

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        body = {
            "model": self.model,
            **self._wording(prompt.content),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _wording(self, content: str | Sequence[int]) -> dict[str, Any]:
        return (
            {"messages": [{"role": "user", "content": content}]}
            if self.address.is_chat
            else {"prompt": content}
        )


def read_outcome(recording: Recording | Failure) -> Outcome:
    """Return what a recording says. Whatever is not a whole answer is a `Failure`."""
    if isinstance(recording, Failure):
        return recording
    try:
        status, body = recording.read()
    except ConnectionCutError as error:
        return Failure("connection cut", shortened(str(error)))
    if status != 200:
        return Failure(
            f"HTTP {status}", shortened(b"".join(piece for _, piece in body).decode(errors="replace"))
        )
    return read_answer(recording.sent, recording.pieces[-1][0], body)

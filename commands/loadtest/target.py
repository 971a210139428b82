"""A server under load: the requests that it is sent, and their outcomes."""

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
    """A server cannot be loaded at all. The message says which server and why."""


class Target:
    """One server.

    `model` is the model that requests name: the address's, or the first that the server lists.
    """

    def __init__(self, address: Address, ignore_eos: bool) -> None:
        self.address = address
        self.model = address.model
        self._url = urlsplit(address.base_url)
        self._extra = {**({"ignore_eos": True} if ignore_eos else {}), **(address.extra_body or {})}
        self._headers = [] if address.api_key is None else [("Authorization", f"Bearer {address.api_key}")]

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless the address names one. Raises `TargetError`."""
        if self.model is not None:
            return
        url = self.address.base_url + self.address.models_path
        try:
            # trust_env=False: a proxy from the environment could not reach a loopback address.
            async with httpx.AsyncClient(
                headers=self._headers, timeout=CONNECT_LIMIT, trust_env=False
            ) as client:
                response = await client.get(url)
        except httpx.HTTPError as error:
            raise TargetError(f"{url} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise TargetError(f"{url} answers HTTP {response.status_code} {shortened(response.text)}")
        try:
            self.model = str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{url} names no model; name one by --model") from error

    async def send(self, prompt: Prompt) -> Recording | Failure:
        """Send one request and record its whole response."""
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
    """Parse a recording. All but a complete answer is a `Failure`."""
    if isinstance(recording, Failure):
        return recording
    try:
        status, body = recording.read()
    except ConnectionCutError as error:
        return Failure("connection cut", shortened(str(error)))
    if status != 200:
        text = b"".join(piece for _, piece in body).decode(errors="replace")
        return Failure(f"HTTP {status}", shortened(text))
    return read_answer(recording.sent, recording.pieces[-1][0], body)

"""A server under load, as its client sees it: how a request is worded and sent, and what came of it."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import httpx

from server.bench.answer import Answer, Failure, read_answer, shortened
from server.bench.config import Address
from server.bench.prompts import Prompt

CONNECT_TIMEOUT = 30.0  # seconds; the time of an answer is bounded by the run's

Outcome: TypeAlias = Answer | Failure


class TargetError(Exception):
    """A server that cannot be loaded at all; the message says which and why."""


class Target:
    """An open client of one server. `model` is set once the server has told it, or from the address."""

    def __init__(self, address: Address, ignore_eos: bool) -> None:
        self.address = address
        self.model = address.model
        self._extra = {**({"ignore_eos": True} if ignore_eos else {}), **(address.extra_body or {})}
        headers = {"Accept-Encoding": "identity"}  # chunks as the server sends them
        if address.api_key is not None:
            headers["Authorization"] = f"Bearer {address.api_key}"
        self._client = httpx.AsyncClient(
            base_url=address.base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy would be measured too, and could not reach a loopback address
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless one was named. Raises `TargetError`."""
        if self.model is not None:
            return
        place = self.address.base_url + self.address.models_path
        try:
            response = await self._client.get(self.address.models_path, timeout=CONNECT_TIMEOUT)
        except httpx.HTTPError as error:
            raise TargetError(f"{place} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise TargetError(f"{place} answers HTTP {response.status_code} {shortened(response.text)}")
        try:
            self.model = str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{place} names no model; name one by --model") from error

    async def send(self, prompt: Prompt) -> Outcome:
        """Send one request and read its answer to the end. Whatever goes wrong is a `Failure`."""
        received: list[tuple[float, bytes]] = []
        sent = time.perf_counter()
        try:
            async with self._client.stream("POST", self.address.endpoint, json=self._body(prompt)) as response:
                if response.status_code != 200:
                    return Failure(f"HTTP {response.status_code}", shortened((await response.aread()).decode(errors="replace")))
                # Parsing waits until the answer is complete, so as not to delay other streams' moments.
                async for piece in response.aiter_raw():
                    received.append((time.perf_counter(), piece))  # noqa: PERF401 (the moments count)
        except httpx.HTTPError as error:
            return Failure(f"connection: {type(error).__name__}", shortened(str(error)))
        return read_answer(sent, time.perf_counter(), received)

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
        return {"messages": [{"role": "user", "content": content}]} if self.address.is_chat else {"prompt": content}

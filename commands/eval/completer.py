"""A client that completes prompts of token ids, and reports the slot usage that the server returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from commands.eval.errors import EvalError
from commands.eval.prompts import TokenPrompt
from commands.shared.text import shortened
from server.protocol.usage import CacheUsage

_TIMEOUT = httpx.Timeout(30.0, read=1800.0)  # seconds; a case may wait for the prefill of other cases


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """The tokens that slots kept and evicted, summed over sequences, and the names of their pools.

    `num_quantized` of those kept are held in 4 bits.

    The counts are those of a full-attention layer, as the server reports them.
    """

    pools: tuple[str, ...]
    num_kept: int
    num_evicted: int
    num_quantized: int = 0

    @property
    def compression(self) -> float:
        """Tokens written for each token kept at the end."""
        return (self.num_kept + self.num_evicted) / self.num_kept

    def __add__(self, more: Self) -> "SlotUsage":
        pools = tuple(sorted({*self.pools, *more.pools}))
        return SlotUsage(
            pools,
            self.num_kept + more.num_kept,
            self.num_evicted + more.num_evicted,
            self.num_quantized + more.num_quantized,
        )

    def as_json(self) -> dict[str, Any]:
        quantized = {"quantized_tokens": self.num_quantized} if self.num_quantized else {}
        return {
            "pools": self.pools,
            "kept_tokens": self.num_kept,
            "evicted_tokens": self.num_evicted,
            "compression": self.compression,
        } | quantized


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    `num_packed` of its `num_tokens` tokens were read from a packed slot. `num_packed` and `slot_usage` are
    None if the server does not report them.
    """

    text: str
    num_tokens: int
    num_packed: int | None
    slot_usage: SlotUsage | None = None


class Completer:
    """Completes prompts on one server, or on one `pool` of it. Use `open`.

    `packs` says whether the server supports our extensions and reports slot usage.
    """

    def __init__(self, http: httpx.AsyncClient, base_url: str, model: str, pool: str | None) -> None:
        self.model = model
        self.packs = True
        self._http = http
        self._url = f"{base_url}/v1/completions"
        self._pool = {} if pool is None else {"cache_policy": pool}

    @classmethod
    async def open(
        cls, http: httpx.AsyncClient, base_url: str, model: str | None, pool: str | None = None
    ) -> "Completer":
        """Find the model's name and the server's abilities, by a short request.

        Raises `EvalError`, also for an unknown pool.
        """
        completer = cls(http, base_url, model or await first_model(http, base_url), pool)
        probe = {"prompt": "a b c d", "max_tokens": 1, "num_prefill_tokens": 1}
        try:
            usage = (await completer._post(probe))["usage"]
        except EvalError:
            # Another server may refuse unknown fields. None leaves the field out.
            usage = (await completer._post(probe | {"num_prefill_tokens": None}))["usage"]
        completer.packs = "cache" in usage
        if pool is not None and not completer.packs:
            raise EvalError(f"{base_url} reports no slot usage, so --cache-policy cannot select a pool of it")
        return completer

    async def complete(self, prompt: TokenPrompt, sampling: Mapping[str, float]) -> Completion:
        """Return the answer, greedy unless `sampling` has other fields of the request. Raises `EvalError`."""
        extensions: dict[str, Any] = {}
        if self.packs:
            extensions = {"num_prefill_tokens": prompt.num_prefill_tokens, "question": prompt.question}
        answer = await self._post(
            {"prompt": prompt.token_ids.tolist(), "max_tokens": prompt.max_tokens, **sampling, **extensions}
        )
        text = answer["choices"][0]["text"]
        usage = answer["usage"]
        if not self.packs:
            return Completion(text, usage["completion_tokens"], None)
        cache: CacheUsage = usage["cache"]
        counts = cache["kept_tokens"], cache["evicted_tokens"], cache.get("quantized_tokens", 0)
        slot_usage = SlotUsage((cache["policy"],), *counts)
        return Completion(text, usage["completion_tokens"], cache["packed_completion_tokens"], slot_usage)

    async def _post(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        present = {name: value for name, value in fields.items() if value is not None}
        body = {"model": self.model, "temperature": 0, **self._pool, **present}
        try:
            response = await self._http.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise EvalError(f"{self._url} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EvalError(f"{self._url} answers HTTP {response.status_code} {shortened(response.text)}")
        answer: dict[str, Any] = response.json()
        return answer


def http_client(api_key: str | None) -> httpx.AsyncClient:
    """Return a client without a limit of connections: the caller limits concurrency."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    # trust_env=False: a proxy from the environment could not reach a loopback address.
    return httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False)


async def first_model(http: httpx.AsyncClient, base_url: str) -> str:
    """Return the name of the first model that a server lists. Raises `EvalError`."""
    url = f"{base_url}/v1/models"
    try:
        response = await http.get(url)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EvalError(
            f"{url} names no model ({type(error).__name__} {error}): name one by --served-model-name"
        ) from error

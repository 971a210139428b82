"""A server as an evaluation asks it: a prompt of token ids goes on, the slot packed where the prompt says, if the server can."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from commands.eval.errors import EvalError
from commands.eval.prompts import TokenPrompt
from commands.shared.text import shortened
from server.protocol.usage import CacheUsage

_TIMEOUT = httpx.Timeout(30.0, read=1800.0)  # seconds: a case may wait for the others' long prompts


@dataclass(frozen=True, slots=True)
class Held:
    """What became of sequences in their slots, in tokens of a full-attention layer, as the server says; and the pools that they were in."""

    pools: tuple[str, ...]
    num_kept: int
    num_evicted: int

    @property
    def compression(self) -> float:
        """Tokens written for each one held at the end."""
        return (self.num_kept + self.num_evicted) / self.num_kept

    def __add__(self, more: Self) -> "Held":
        pools = tuple(sorted({*self.pools, *more.pools}))
        return Held(pools, self.num_kept + more.num_kept, self.num_evicted + more.num_evicted)

    def as_json(self) -> dict[str, Any]:
        own = {
            "kept_tokens": self.num_kept,
            "evicted_tokens": self.num_evicted,
            "compression": self.compression,
        }
        return {"pools": self.pools, **own}


@dataclass(frozen=True, slots=True)
class Completion:
    """`num_packed` of the answer's `num_tokens` were read from a packed slot, as the server says; None: it says nothing."""

    text: str
    num_tokens: int
    num_packed: int | None
    held: Held | None = None


class Completer:
    """Asks one server, or one `pool` of its. `packs` says whether it knows `num_prefill_tokens`. Use `open`."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, model: str, pool: str | None) -> None:
        self._http, self._base_url, self.model, self.packs = http, base_url, model, True
        self._pool = {} if pool is None else {"cache_policy": pool}

    @classmethod
    async def open(
        cls, http: httpx.AsyncClient, base_url: str, model: str | None, pool: str | None = None
    ) -> "Completer":
        """Find the model's name and what the server can. Raises `EvalError`, as for a pool that it does not have."""
        completer = cls(http, base_url, model or await first_model(http, base_url), pool)
        probe = {"prompt": "a b c d", "max_tokens": 1, "num_prefill_tokens": 1}
        try:
            usage = (await completer._post(probe))["usage"]
        except EvalError:  # it may be strict about fields that it does not know
            usage = (await completer._post(probe | {"num_prefill_tokens": None}))["usage"]
        completer.packs = "cache" in usage
        if pool is not None and not completer.packs:
            raise EvalError(
                f"{base_url} does not tell of slots: no pool of it can be asked by --cache-policy"
            )
        return completer

    async def complete(self, prompt: TokenPrompt, sampling: Mapping[str, float]) -> Completion:
        """Return the answer, drawn with these options of the request; greedily without. Raises `EvalError`."""
        extra = {"num_prefill_tokens": prompt.num_prefill_tokens} if self.packs else {}
        answer = await self._post(
            {"prompt": prompt.token_ids.tolist(), "max_tokens": prompt.max_tokens, **sampling, **extra}
        )
        text, usage = answer["choices"][0]["text"], answer["usage"]
        if not self.packs:
            return Completion(text, usage["completion_tokens"], None)
        cache: CacheUsage = usage["cache"]
        held = Held((cache["policy"],), cache["kept_tokens"], cache["evicted_tokens"])
        return Completion(text, usage["completion_tokens"], cache["packed_completion_tokens"], held)

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in body.items() if value is not None}
        place = f"{self._base_url}/v1/completions"
        try:
            response = await self._http.post(
                place, json={"model": self.model, "temperature": 0, **self._pool, **given}
            )
        except httpx.HTTPError as error:
            raise EvalError(f"{place} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EvalError(f"{place} answers HTTP {response.status_code} {shortened(response.text)}")
        answer: dict[str, Any] = response.json()
        return answer


def http_client(api_key: str | None) -> httpx.AsyncClient:
    """Return a client; a proxy of the environment's could not reach a loopback address."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(
        headers=headers, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None), trust_env=False
    )


async def first_model(http: httpx.AsyncClient, base_url: str) -> str:
    """Return the name of the first model that a server lists. Raises `EvalError`."""
    place = f"{base_url}/v1/models"
    try:
        response = await http.get(place)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EvalError(
            f"{place} names no model ({type(error).__name__} {error}): name one by --served-model-name"
        ) from error

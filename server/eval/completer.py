"""A server as an evaluation asks it: a prompt of token ids goes on, the slot packed where the prompt says, if the server can."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from server.bench.answer import shortened
from server.eval.errors import EvalError
from server.eval.prompts import TokenPrompt

_TIMEOUT = httpx.Timeout(30.0, read=1800.0)  # seconds: a case may wait for the others' long prompts


@dataclass(frozen=True, slots=True)
class Completion:
    """`num_packed` of the answer's `num_tokens` were read from a packed slot, as the server says; None: it says nothing."""

    text: str
    num_tokens: int
    num_packed: int | None


class Completer:
    """Asks one server. `packs` says whether it knows `num_prefill_tokens`. Use `open`."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, model: str, packs: bool) -> None:
        self._http, self._base_url, self.model, self.packs = http, base_url, model, packs

    @classmethod
    async def open(cls, http: httpx.AsyncClient, base_url: str, model: str | None) -> "Completer":
        """Find the model's name and what the server can. Raises `EvalError`."""
        completer = cls(http, base_url, model or await first_model(http, base_url), packs=True)
        probe = {"prompt": "a b c d", "max_tokens": 1, "num_prefill_tokens": 1}
        try:
            usage = (await completer._post(probe))["usage"]
        except EvalError:  # it may be strict about fields that it does not know
            usage = (await completer._post(probe | {"num_prefill_tokens": None}))["usage"]
        completer.packs = "cache" in usage
        return completer

    async def complete(self, prompt: TokenPrompt, sampling: Mapping[str, float]) -> Completion:
        """Return the answer, drawn with these options of the request; greedily without. Raises `EvalError`."""
        extra = {"num_prefill_tokens": prompt.num_prefill_tokens} if self.packs else {}
        answer = await self._post({"prompt": prompt.token_ids.tolist(), "max_tokens": prompt.max_tokens, **sampling, **extra})
        usage = answer["usage"]
        packed = usage["cache"]["packed_completion_tokens"] if self.packs else None
        return Completion(answer["choices"][0]["text"], usage["completion_tokens"], packed)

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in body.items() if value is not None}
        place = f"{self._base_url}/v1/completions"
        try:
            response = await self._http.post(place, json={"model": self.model, "temperature": 0, **given})
        except httpx.HTTPError as error:
            raise EvalError(f"{place} cannot be reached: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EvalError(f"{place} answers HTTP {response.status_code} {shortened(response.text)}")
        answer: dict[str, Any] = response.json()
        return answer


def http_client(api_key: str | None) -> httpx.AsyncClient:
    """Return a client; a proxy of the environment's could not reach a loopback address."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None), trust_env=False)


async def first_model(http: httpx.AsyncClient, base_url: str) -> str:
    """Return the name of the first model that a server lists. Raises `EvalError`."""
    place = f"{base_url}/v1/models"
    try:
        response = await http.get(place)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EvalError(f"{place} names no model ({type(error).__name__} {error}): name one by --served-model-name") from error

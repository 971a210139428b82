"""`return_kept_tokens`: what a slot held of a prompt, in bodies, in streams, and where there is no slot."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from backends.fake import slot_pool
from cache.policy import full, snapstream
from cache.scorer import WindowScorer
from server.text.renderer import Renderer
from tests.server.events import data
from tests.server.serving import serve, spec

SMALL = snapstream(2, 8, 6, WindowScorer(observation_window=4), lend_kept=True, lend_ring=True)
TEXT = "The größte house 🏠 of the little town has seven windows and a door that is never open in winter."


@pytest.fixture(scope="module")
def http(renderer: Renderer) -> Iterator[httpx.Client]:
    pools = (slot_pool(2, full(1024), 1024), slot_pool(2, SMALL, 1024, "small"))
    with (
        serve(renderer, backend_spec=spec(pools=pools)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def complete(http: httpx.Client, **options: Any) -> Any:
    answer = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 2, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_each_token_has_its_text_and_share(http: httpx.Client) -> None:
    choice = complete(http, pool="small", return_kept_tokens=True, return_token_ids=True)
    kept = choice["kept_tokens"]
    assert "".join(kept["tokens"]) == f"<|bos|>{TEXT}"
    assert len(kept["tokens"]) == len(kept["mean"]) == len(choice["prompt_token_ids"])
    place = SMALL.place(len(kept["mean"]))
    assert kept["mean"][:2] == [1, 1]
    assert kept["mean"][place.candidates_end :] == [1] * (len(kept["mean"]) - place.candidates_end)
    assert sum(kept["mean"]) == SMALL.layout.capacity
    assert 0 in kept["mean"]
    assert "heads" not in kept


def test_heads_are_bitmaps(http: httpx.Client) -> None:
    kept = complete(http, pool="small", return_kept_tokens="heads")["kept_tokens"]
    ((head,),) = kept["heads"]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(head), np.uint8), bitorder="little")
    assert bits[: len(kept["mean"])].tolist() == kept["mean"]


def test_all_of_a_prompt_that_fits_is_held(http: httpx.Client) -> None:
    assert set(complete(http, pool="full", return_kept_tokens=True)["kept_tokens"]["mean"]) == {1}


def test_streams_have_it_before_the_answer(http: httpx.Client) -> None:
    whole = complete(http, pool="small", return_kept_tokens=True)["kept_tokens"]
    body = {"prompt": [TEXT, TEXT], "max_tokens": 2, "pool": "small", "return_kept_tokens": True, "n": 2}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        chunks = list(data(response))
    found = {chunk["prompt"]: chunk["kept_tokens"] for chunk in chunks if "kept_tokens" in chunk}
    assert found == {0: whole, 1: whole}
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "return_kept_tokens": True}
    answer = http.post("/v1/chat/completions", json=chat).json()
    with http.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as response:
        first = next(data(response))
    assert first["choices"] == []
    assert first["kept_tokens"] == answer["kept_tokens"]
    assert TEXT in "".join(answer["kept_tokens"]["tokens"])


def test_it_is_absent_unless_requested_and_null_without_a_slot(http: httpx.Client) -> None:
    assert "kept_tokens" not in complete(http)
    scored = complete(http, max_tokens=0, echo=True, logprobs=0, return_kept_tokens=True)
    assert scored["kept_tokens"] is None


def test_only_the_tokens_that_prefill_reads_are_listed(http: httpx.Client) -> None:
    kept = complete(http, pool="small", num_prefill_tokens=20, return_kept_tokens=True)["kept_tokens"]
    assert len(kept["tokens"]) == len(kept["mean"]) == 20

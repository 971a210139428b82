"""`/v1/embeddings` over HTTP: through the real SDK, against the fake backend's own numbers."""

import asyncio
import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from backends.fake_model import fold, hidden_state
from backends.interface import PromptPooling
from server.options.settings import Limits
from server.text.renderer import Renderer
from tests.server.serving import MODEL, VOCAB_SIZE, RunningServer, serve, settings, spec

SIZE = spec().embedding_size
TEXTS = ["Anna keeps the lamp.", "The bells stayed near the theatre.", "naïve 日本語"]


def unit(vector: list[float]) -> list[float]:
    length = math.hypot(*vector)
    return [number / length for number in vector]


def mean_of(token_ids: list[int]) -> list[float]:
    states = [hidden_state(fold(0, token_ids[: end + 1]), SIZE) for end in range(len(token_ids))]
    return unit([sum(numbers) / len(states) for numbers in zip(*states, strict=True)])


def tokens_of(renderer: Renderer, text: str) -> list[int]:
    return list(asyncio.run(renderer.encode(text, add_special_tokens=True)))


def test_texts(sdk: openai.OpenAI, renderer: Renderer) -> None:
    raw = sdk.embeddings.with_raw_response.create(model=MODEL, input=TEXTS, encoding_format="float")
    answer = CreateEmbeddingResponse.model_validate_json(raw.content, strict=True)
    prompts = [tokens_of(renderer, text) for text in TEXTS]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, prompt in zip(answer.data, prompts, strict=True):
        assert item.embedding == pytest.approx(mean_of(prompt))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    assert answer.model == MODEL


def test_the_sdk_requests_base64_and_reads_it(sdk: openai.OpenAI, renderer: Renderer) -> None:
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS[0])
    assert answer.data[0].embedding == pytest.approx(mean_of(tokens_of(renderer, TEXTS[0])), abs=1e-6)


def test_an_embedding_needs_no_feature_of_sampling(renderer: Renderer) -> None:
    with (
        serve(renderer, backend_spec=spec(features=frozenset())) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        assert http.post("/v1/embeddings", json={"input": [5, 6, 7]}).status_code == 200


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    text = http.post("/v1/embeddings", json={"input": [5, 6, 7], "encoding_format": "base64"}).json()["data"][
        0
    ]["embedding"]
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(text))) == pytest.approx(
        mean_of([5, 6, 7]), abs=1e-6
    )


def test_dimensions_are_the_first_ones_made_a_unit(http: httpx.Client) -> None:
    [item] = http.post("/v1/embeddings", json={"input": [[5, 6, 7]], "dimensions": 3}).json()["data"]
    assert item["embedding"] == pytest.approx(unit(mean_of([5, 6, 7])[:3]))


def test_last_pooling_returns_the_last_tokens_hidden_state(renderer: Renderer) -> None:
    with serve(renderer, settings(embedding_pooling=PromptPooling.LAST)) as running:
        [item] = httpx.post(f"{running.url}/v1/embeddings", json={"input": [5, 6, 7]}).json()["data"]
    assert item["embedding"] == pytest.approx(unit(list(hidden_state(fold(0, [5, 6, 7]), SIZE))))


def test_more_inputs_than_slots_and_queue_hold(sdk: openai.OpenAI, running: RunningServer) -> None:
    """A request's inputs take turns: it holds few tickets for any number of inputs."""
    answer = sdk.embeddings.create(model=MODEL, input=[[number % VOCAB_SIZE, 1] for number in range(1000)])
    assert answer.data[999].embedding == pytest.approx(mean_of([999, 1]), abs=1e-6)
    running.observed.wait_until(
        lambda: (
            running.observed.last_step is not None
            and running.observed.last_step.stats.num_scratch_in_use == 0
        )
    )


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "Missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": [VOCAB_SIZE]}, "input", str(VOCAB_SIZE)),
        ({"input": [-1]}, "input[0]", "0"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions", str(SIZE)),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": [1] * 1025}, "input", "1024"),
        ({"input": [[1]] * 2049}, "input", "2048"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1"),
        ({"input": "a", "normalize": False}, "normalize", "not supported"),
    ],
)
def test_invalid_values_are_refused(http: httpx.Client, body: dict[str, Any], param: str, says: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_inputs_can_be_text_or_ids_and_truncated(http: httpx.Client) -> None:
    body = {
        "input": ["Hello", [5, 6, 7, 8], [7, 8]],
        "truncate_prompt_tokens": 2,
        "add_special_tokens": False,
        "normalize": True,
    }
    answer = http.post("/v1/embeddings", json=body).json()
    _, cut, alike = (item["embedding"] for item in answer["data"])
    assert cut == alike
    assert answer["usage"]["prompt_tokens"] <= 6


def test_a_backend_that_cannot(renderer: Renderer) -> None:
    with serve(renderer, settings(limits=Limits()), spec(embedding_size=0)) as running:
        answer = httpx.post(f"{running.url}/v1/embeddings", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")

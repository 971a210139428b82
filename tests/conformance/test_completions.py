"""`/v1/completions`, `/v1/models` and `/v1/embeddings`."""

import base64
import math

from tests.conformance.api import Api, text_of


def test_answer(api: Api) -> None:
    """completions: an answer's form"""
    answer = api.complete()
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert {"text", "index", "logprobs", "finish_reason"} <= set(choice)
    assert answer["usage"]["completion_tokens"] <= 8


def test_stream(api: Api) -> None:
    """completions: streaming says what the whole answer says"""
    chunks = api.stream("/v1/completions", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert text_of(chunks) == api.complete()["choices"][0]["text"]


def test_several_prompts(api: Api) -> None:
    """completions: a list of prompts, each with n choices"""
    answer = api.complete(prompt=["One", "Two"], n=2, temperature=1)
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2, 3]


def test_token_ids(api: Api) -> None:
    """completions: a prompt of token ids"""
    assert api.complete(prompt=[5, 6, 7, 8])["usage"]["prompt_tokens"] == 4


def test_logprobs(api: Api) -> None:
    """completions: logprobs"""
    logprobs = api.complete(logprobs=2)["choices"][0]["logprobs"]
    count = len(logprobs["tokens"])
    assert (
        count
        == len(logprobs["token_logprobs"])
        == len(logprobs["top_logprobs"])
        == len(logprobs["text_offset"])
    )
    assert all(number <= 0 for number in logprobs["token_logprobs"])


def test_echo(api: Api) -> None:
    """completions: echo with logprobs and without generation"""
    choice = api.complete(echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert choice["text"] == "Once upon a time"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(number <= 0 for number in choice["logprobs"]["token_logprobs"][1:])


def test_stop(api: Api) -> None:
    """completions: stop"""
    text = api.complete(max_tokens=12)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    assert api.complete(max_tokens=12, stop=stop)["choices"][0]["text"] == text[: text.index(stop)]


def test_models(api: Api) -> None:
    """models: list and retrieve"""
    models = api.get("/v1/models")
    assert models["object"] == "list"
    assert {"id", "object", "created", "owned_by"} <= set(models["data"][0])
    assert api.get(f"/v1/models/{api.model}")["id"] == api.model


def test_embeddings(api: Api) -> None:
    """embeddings: several texts, each a vector of length 1"""
    answer = api.post("/v1/embeddings", input=["one", "two", "one"])
    vectors = [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]
    assert len({len(vector) for vector in vectors}) == 1
    assert all(abs(math.hypot(*vector) - 1) < 1e-3 for vector in vectors)
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-3
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


def test_embeddings_base64(api: Api) -> None:
    """embeddings: base64"""
    plain, coded = (
        api.post("/v1/embeddings", input="one", encoding_format=form)["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert len(base64.b64decode(coded)) == 4 * len(plain)


def test_embeddings_dimensions(api: Api) -> None:
    """embeddings: dimensions"""
    assert len(api.post("/v1/embeddings", input="one", dimensions=4)["data"][0]["embedding"]) == 4

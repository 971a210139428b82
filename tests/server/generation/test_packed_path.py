"""`num_prefill_tokens` and `prompt_logprobs` on the wire.

The fake backend loses nothing: what decode reads is scored as prefill would.
"""

from typing import Any

import httpx
import openai
import pytest

from tests.server.events import data
from tests.server.serving import MODEL

PROMPT = list(range(5, 25))
MESSAGES = [{"role": "user", "content": "Anna keeps a falcon. What does Anna keep?"}]


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | options


def ask(http: httpx.Client, **options: Any) -> Any:
    response = http.post("/v1/completions", json=body(**options))
    assert response.status_code == 200, response.text
    return response.json()


def chat(http: httpx.Client, **options: Any) -> Any:
    request = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
    } | options
    response = http.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("num_prefill_tokens", [1, 8, 19, 20])
def test_echoed_logprobs_cover_what_decode_reads(
    http: httpx.Client, num_prefill_tokens: int, max_tokens: int
) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 3, "max_tokens": max_tokens}
    whole, parted = ask(http, **options), ask(http, **options, num_prefill_tokens=num_prefill_tokens)
    assert parted["choices"] == whole["choices"]
    assert len(parted["choices"][0]["logprobs"]["tokens"]) == 20 + max_tokens
    assert (parted["usage"]["prompt_tokens"], parted["usage"]["completion_tokens"]) == (20, max_tokens)


@pytest.mark.parametrize(
    ("num_prefill_tokens", "packed"), [(None, (0, 6)), (20, (0, 6)), (19, (0, 8)), (8, (11, 8)), (1, (18, 8))]
)
def test_usage_says_how_many_tokens_were_predicted_from_the_slot(
    http: httpx.Client, num_prefill_tokens: int | None, packed: tuple[int, int]
) -> None:
    """The first token of what follows prefill is prefill's."""
    usage = ask(http, n=2, num_prefill_tokens=num_prefill_tokens)["usage"]
    assert (usage["cache"]["packed_prompt_tokens"], usage["cache"]["packed_completion_tokens"]) == packed
    with http.stream(
        "POST",
        "/v1/completions",
        json=body(
            n=2, num_prefill_tokens=num_prefill_tokens, stream=True, stream_options={"include_usage": True}
        ),
    ) as response:
        assert list(data(response))[-1]["usage"] == usage


def test_every_prompt_is_parted(http: httpx.Client) -> None:
    usage = ask(http, prompt=[PROMPT, PROMPT[:10]], n=2, num_prefill_tokens=4)["usage"]
    assert usage["cache"]["packed_prompt_tokens"] == 15 + 5


def test_prompt_logprobs_have_vllms_shape(http: httpx.Client) -> None:
    [choice] = ask(http, prompt_logprobs=2, echo=True, logprobs=0, num_prefill_tokens=8)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    echoed = zip(choice["logprobs"]["tokens"][1:], choice["logprobs"]["token_logprobs"][1:], strict=True)
    for token_id, entry, (text, logprob) in zip(PROMPT[1:], others, echoed, strict=False):
        own, *top = entry.values()
        assert next(iter(entry)) == str(token_id)
        assert (own["decoded_token"], own["logprob"]) == (text, logprob)
        assert [other["rank"] for other in top] == [rank for rank in (1, 2) if rank != own["rank"]]
        assert all(other.keys() == {"logprob", "rank", "decoded_token"} for other in entry.values())
    assert len(others) == 19
    assert [list(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [
        [token] for token in choice["logprobs"]["tokens"][1:3]
    ]


def test_prompt_logprobs_of_a_chat_are_beside_its_choices(http: httpx.Client) -> None:
    whole, parted = chat(http, prompt_logprobs=1), chat(http, prompt_logprobs=1, num_prefill_tokens=3)
    assert parted["prompt_logprobs"] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert parted["choices"] == whole["choices"]
    assert parted["usage"]["cache"]["packed_completion_tokens"] == 4
    assert chat(http)["prompt_logprobs"] is None


def test_a_prompt_of_one_token_has_nothing_to_score(http: httpx.Client) -> None:
    assert ask(http, prompt=[5], prompt_logprobs=1, max_tokens=0)["choices"][0]["prompt_logprobs"] == [None]


def test_a_stop_string_ends_what_was_not_forced(http: httpx.Client) -> None:
    text = ask(http, num_prefill_tokens=3)["choices"][0]["text"]
    answer = ask(http, num_prefill_tokens=3, stop=text[1:3])
    assert answer["choices"][0]["text"] == text[:1]
    assert answer["usage"]["cache"]["packed_completion_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("options", "param", "part"),
    [
        ({"num_prefill_tokens": 0}, "num_prefill_tokens", "greater than or equal to 1"),
        ({"num_prefill_tokens": -3}, "num_prefill_tokens", "greater than or equal to 1"),
        ({"num_prefill_tokens": 21}, "num_prefill_tokens", "at most 20"),
        ({"num_prefill_tokens": 2.5}, "num_prefill_tokens", "integer"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "'stream'"),
        ({"max_tokens": 0}, "max_tokens", "'prompt_logprobs'"),
        ({"num_prefill_tokens": 5, "max_tokens": 1020}, "prompt", "1024"),
    ],
)
def test_bad_values_are_refused_with_field_and_limit(
    http: httpx.Client, options: dict[str, Any], param: str, part: str
) -> None:
    response = http.post("/v1/completions", json=body(**options))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert part in error["message"]


def test_openais_client_sends_and_finds_them(sdk: openai.OpenAI) -> None:
    extra = {"num_prefill_tokens": 8, "prompt_logprobs": 0}
    completion = sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, extra_body=extra)
    assert completion.usage is not None
    assert completion.usage.model_extra is not None
    assert completion.usage.model_extra["cache"]["packed_prompt_tokens"] == 11
    assert len((completion.choices[0].model_extra or {})["prompt_logprobs"]) == 20

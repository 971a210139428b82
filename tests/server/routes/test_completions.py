"""`/v1/completions` on the wire: prompts of every kind, `echo`, and log-probabilities as parallel lists."""

import re
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.events import data
from tests.server.serving import MODEL, serve, settings

PATH = "/v1/completions"


def ask(http: httpx.Client, **options: Any) -> Any:
    body = {
        "model": MODEL,
        "prompt": "Anna keeps",
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
    } | options
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, **options: Any) -> list[Any]:
    body = {
        "model": MODEL,
        "prompt": "Anna keeps",
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    } | options
    with http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
        return list(data(response))


def tokens_of(http: httpx.Client, text: str) -> list[int]:
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert all(isinstance(token, int) for token in tokens)
    return list(tokens)


def test_token_ids_are_a_prompt_as_good_as_its_text(http: httpx.Client) -> None:
    prompt = tokens_of(http, "Anna keeps")
    from_text = ask(http)
    assert ask(http, prompt=prompt)["choices"] == from_text["choices"]
    assert ask(http, prompt=[prompt])["choices"] == from_text["choices"]
    assert ask(http, prompt=["Anna keeps"])["choices"] == from_text["choices"]


def test_usage_counts_every_prompt_once(http: httpx.Client) -> None:
    answer = ask(http, prompt=[[5, 6, 7], [8, 9]], n=2)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 16)


def test_an_omitted_limit_is_openais_sixteen(http: httpx.Client) -> None:
    assert ask(http, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_an_omitted_limit_never_errs_near_the_end_of_the_context(http: httpx.Client) -> None:
    assert ask(http, prompt=[5] * 1020, max_tokens=None)["usage"]["completion_tokens"] == 4


def test_best_of_is_accepted_if_it_has_no_effect(http: httpx.Client) -> None:
    assert len(ask(http, n=2, best_of=2)["choices"]) == 2


def test_echo_puts_the_prompt_first(http: httpx.Client) -> None:
    alone = ask(http)["choices"][0]["text"]
    assert ask(http, echo=True)["choices"][0]["text"] == "Anna keeps" + alone
    assert ask(http, prompt=tokens_of(http, " keeps")[1:], echo=True)["choices"][0]["text"].startswith(
        " keeps"
    )


def test_logprobs_are_parallel_lists(http: httpx.Client) -> None:
    [choice] = ask(http, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {4}
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob == max(top.values())


def test_zero_logprobs_are_those_of_the_tokens(http: httpx.Client) -> None:
    logprobs = ask(http, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_named_tokens_have_logprobs_beside_the_likeliest(http: httpx.Client) -> None:
    options = {"logprobs": 1, "return_tokens_as_token_ids": True}
    plain = ask(http, **options)["choices"][0]["logprobs"]
    found = ask(http, **options, logprob_token_ids=[300, 301, 300])["choices"][0]["logprobs"]
    for before, after in zip(plain["top_logprobs"], found["top_logprobs"], strict=True):
        assert before.items() <= after.items()
        assert set(after) == {*before, "token_id:300", "token_id:301"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 65, "logprobs": 1}, "logprob_token_ids"),
        ({"stop_regex": "a*"}, "stop_regex"),
        ({"stop_regex": ["a", "["]}, "stop_regex"),
        ({"stop_regex": "a" * 1000}, "stop_regex"),
        ({"stop_regex": ["a"] * 17}, "stop_regex"),
        ({"stop_regex": "a", "n": 17}, "stop_regex"),
        ({"stop_regex": "a$"}, "stop_regex"),
        ({"stop_regex": "a)|(?:b"}, "stop_regex"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
    ids=str,
)
def test_wrong_values_of_other_servers_fields(
    http: httpx.Client, options: dict[str, Any], param: str
) -> None:
    response = http.post("/v1/completions", json={"prompt": "a"} | options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_behind_the_match_of_an_expression(http: httpx.Client, stream: bool) -> None:
    options: dict[str, Any] = {"prompt": "Anna", "max_tokens": 200, "seed": 1, "temperature": 2.0}
    whole = http.post("/v1/completions", json=options).json()["choices"][0]["text"]
    match = re.search("[aeiou][^aeiou]", whole)
    assert match is not None
    body = options | {"stop_regex": "[aeiou][^aeiou]", "stream": stream}
    response = http.post("/v1/completions", json=body)
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in data(response))
    else:
        choice = response.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "[aeiou][^aeiou]")
        text = choice["text"]
    assert text == whole[: match.end()]


@pytest.mark.parametrize("stream", [False, True])
def test_an_expression_that_proves_too_complex_ends_the_request(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 2.0, "stream": stream}
    response = http.post("/v1/completions", json=body | {"stop_regex": r"(?s)\w.{0,300}\w\n\n\n"})
    assert response.status_code in (400, 200 if stream else 400)  # before the first chunk, or within it
    assert "too complex" in response.text
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_echoed_logprobs_cover_the_prompt_and_begin_with_null(http: httpx.Client) -> None:
    prompt = tokens_of(http, "Anna keeps the lamp")
    [choice] = ask(http, prompt=prompt, echo=True, logprobs=1, max_tokens=2)["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(prompt) + 2}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0], logprobs["text_offset"][0]) == (
        None,
        None,
        0,
    )
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_a_prompt_can_be_scored_without_generating(http: httpx.Client) -> None:
    prompts = [tokens_of(http, "Anna keeps the lamp"), tokens_of(http, "Ben")]
    answer = ask(http, prompt=prompts, echo=True, logprobs=3, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0
    longer = ask(http, prompt=prompts, echo=True, logprobs=3, max_tokens=1)
    for scored, generated, prompt in zip(answer["choices"], longer["choices"], prompts, strict=True):
        assert scored["finish_reason"] == "length"
        assert scored["logprobs"]["token_logprobs"] == generated["logprobs"]["token_logprobs"][: len(prompt)]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Anna", ["Anna", "Ben keeps"], [5, 6], [[5, 6], [7]]])
def test_a_stream_equals_the_unstreamed_answer(
    http: httpx.Client, prompt: Any, n: int, logprobs: int | None, echo: bool
) -> None:
    options = {"prompt": prompt, "n": n, "logprobs": logprobs, "echo": echo, "seed": 1, "temperature": 1}
    chunks = stream(http, **options, stream_options={"include_usage": True})
    whole = ask(http, **options)
    assert chunks.pop()["usage"] == whole["usage"]
    for expected in whole["choices"]:
        pieces = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [
            expected["finish_reason"]
        ]
        if logprobs is not None:
            parts = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            for name, values in expected["logprobs"].items():
                assert [value for part in parts for value in part[name]] == values


def test_the_scoring_requests_of_evaluation_harnesses(http: httpx.Client, renderer: Renderer) -> None:
    """They send token ids, one token to generate, and look for the last prompt tokens' alternatives."""
    prompt = tokens_of(http, "Anna keeps the lamp")
    [choice] = ask(http, prompt=[prompt], echo=True, logprobs=1, max_tokens=1)["choices"]
    num_context = len(prompt) - 2
    continuation = choice["logprobs"]["token_logprobs"][num_context:-1]
    assert len(continuation) == 2
    assert choice["logprobs"]["tokens"][num_context:-1] == [
        renderer.token_text(token) for token in prompt[num_context:]
    ]
    assert all(isinstance(top, dict) and top for top in choice["logprobs"]["top_logprobs"][num_context:-1])


def test_the_finish_reason_is_in_the_last_text_delta(http: httpx.Client) -> None:
    for options in ({}, {"logprobs": 1}, {"max_tokens": 1}):
        pieces = [chunk["choices"][0] for chunk in stream(http, **options)]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert all(piece["text"] for piece in pieces)


def test_texts_and_token_ids_can_be_mixed_in_a_list(http: httpx.Client) -> None:
    from_text, from_ids = ask(http, prompt=["Anna keeps", tokens_of(http, "Anna keeps")])["choices"]
    assert from_text["text"] == from_ids["text"]


def test_the_stop_reason_is_reported_in_both_fields(http: httpx.Client) -> None:
    text = ask(http)["choices"][0]["text"]
    [choice] = ask(http, stop=text[2])["choices"]
    assert (choice["stop_reason"], choice["matched_stop"]) == (text[2], text[2])
    assert stream(http, stop=text[2])[-1]["choices"][0]["matched_stop"] == text[2]
    assert ask(http)["choices"][0]["matched_stop"] is None
    tokenizer = http.get("/tokenizer_info").json()
    end_token = tokenizer["added_tokens"][tokenizer["eos_token"]]
    [ended] = ask(http, ignore_eos=False, logit_bias={str(end_token): 100})["choices"]
    assert (ended["finish_reason"], ended["stop_reason"], ended["matched_stop"]) == ("stop", None, end_token)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_offsets_of_text_do_not_count_a_bos(*, is_streamed: bool) -> None:
    inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
    start = inner.convert_tokens_to_ids("<|system|>")
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", pair="<|system|> $A $B", special_tokens=[("<|system|>", start)]
    )
    body = {"prompt": "Anna keeps the lamp", "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0}
    with (
        serve(Renderer(Tokenizer(inner)), settings()) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        if is_streamed:
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                choices = [chunk["choices"][0] for chunk in data(response)]
        else:
            choices = ask(http, **body)["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert tokens[0] == "<|system|>"
    assert text.startswith("Anna keeps the lamp")
    assert offsets[:2] == [0, 0]
    assert all(text[at:].startswith(token) for token, at in zip(tokens[1:], offsets[1:], strict=True))

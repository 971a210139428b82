"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from server.options.models import DEMO_MODEL

TEXT = "Anna keeps the lamp, naïvely: 日本語 \N{FAMILY}."


def tokenize(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_text(http: httpx.Client, tokenizer: Any, add_special_tokens: bool) -> None:
    answer = tokenize(http, prompt=TEXT, add_special_tokens=add_special_tokens, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(TEXT, add_special_tokens=add_special_tokens)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024


def test_messages(http: httpx.Client, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Where is the lamp?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenize(http, messages=messages)["tokens"] == expected
    assert tokenize(http, messages=messages, add_generation_prompt=False)["tokens"] == expected[:-1]
    assert tokenize(http, messages=messages)["token_strs"] is None


def test_tokenize_counts_as_a_prompt(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == tokenize(http, messages=messages)["count"]


def test_tools_have_the_token_count_of_a_chat(http: httpx.Client) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
    turns = {"messages": [{"role": "user", "content": "Where is the lamp?"}], "tools": [tool]}
    answer = http.post("/v1/chat/completions", json=turns | {"max_tokens": 1}).json()
    assert (
        answer["usage"]["prompt_tokens"]
        == tokenize(http, **turns)["count"]
        > tokenize(http, messages=turns["messages"])["count"]
    )
    assert tokenize(http, **turns, tool_choice="none") == tokenize(http, messages=turns["messages"])


def test_there_and_back(http: httpx.Client) -> None:
    tokens = tokenize(http, prompt=TEXT, add_special_tokens=False)["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": TEXT}


def test_the_empty_text(http: httpx.Client) -> None:
    assert tokenize(http, prompt="", add_special_tokens=False)["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": 5},
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
    ],
)
def test_wrong_requests(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_tokenizer_info(http: httpx.Client, tokenizer: Any) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == (
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
    )
    assert info["chat_template"] == tokenizer.chat_template


def test_a_developer_is_the_system_of_templates_that_know_no_other(http: httpx.Client) -> None:
    tokens = [
        http.post(
            "/tokenize", json={"messages": [{"role": role, "content": "x"}, {"role": "user", "content": "y"}]}
        ).json()["tokens"]
        for role in ("developer", "system")
    ]
    assert tokens[0] == tokens[1]

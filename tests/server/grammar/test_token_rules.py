"""`allowed_token_ids` and `bad_words`, over a backend with random tokens under the mask."""

from typing import Any

import httpx
import pytest

from server.grammar.token_rules import TokenChoice, TokenRules, rules_text
from tests.server.serving import VOCAB_SIZE

BODY: dict[str, Any] = {"prompt": "Anna", "max_tokens": 40, "temperature": 2.0, "return_token_ids": True}
END = 2


def token_ids(http: httpx.Client, **options: Any) -> list[int]:
    response = http.post("/v1/completions", json=BODY | options)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def test_only_allowed_tokens_are_drawn(http: httpx.Client) -> None:
    allowed = [50, 60, 70]
    drawn = [token_ids(http, allowed_token_ids=allowed, seed=seed) for seed in range(4)]
    assert all(set(ids) <= set(allowed) and len(ids) == 40 for ids in drawn)  # none could end
    ended = [token_ids(http, allowed_token_ids=[*allowed, END], seed=seed) for seed in range(4)]
    assert any(len(ids) < 40 for ids in ended)


def test_a_bad_word_is_not_written(http: httpx.Client) -> None:
    word = http.post("/detokenize", json={"tokens": [300]}).json()["prompt"]
    allowed = [300, 301]
    assert 300 in token_ids(http, allowed_token_ids=allowed, seed=1)
    assert set(token_ids(http, allowed_token_ids=allowed, bad_words=[word], seed=1)) == {301}


def test_a_bad_word_of_several_tokens_is_cut_at_its_last() -> None:
    rules = TokenRules.parse(rules_text(TokenChoice(), [(5, 6, 7)], 16))
    assert rules is not None
    for token_id, is_banned in ((5, False), (6, True), (5, False), (5, False), (6, True), (8, False)):
        rules.advance(token_id)
        assert (rules.allowed().mask[0] >> 7 & 1 == 0) is is_banned
    assert rules.allowed().may_end
    assert TokenRules.parse('{"grammars": []}') is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE + 100]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words"),
    ],
    ids=str,
)
def test_wrong_rules_are_refused(http: httpx.Client, options: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json=BODY | options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param

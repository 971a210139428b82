"""Which tokens echo the question: the first paragraph, as the tokenizer cut it."""

import pytest

from server.text.question import first_paragraph
from server.text.tokenizer import Tokenizer
from tests.server.text.tokenizers import byte_level, sentencepiece

KINDS = {"byte-level": Tokenizer(byte_level()), "sentencepiece": Tokenizer(sentencepiece())}


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Who?\n\nA long text.", "Who?\n\n"),
        ("Who?\r\n\r\nA long text.", "Who?\r\n\r\n"),
        ("Who? \n \t\nA long text.", "Who? \n \t\n"),
        ("\n\nWho?\n\nA long text.", "\n\nWho?\n\n"),
        ("Who\nand when?\n\nA long text.", "Who\nand when?\n\n"),
        ("Who?\nA long text.", "Who?\nA long text."),
        ("", ""),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_question_is_the_first_paragraph(kind: str, text: str, question: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    echo = first_paragraph(token_ids, tokenizer.vocabulary, 20).token_ids
    assert echo == token_ids[: len(echo)]
    assert tokenizer.decode(echo) == question


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_paragraph_is_cut(kind: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode("A paragraph of more than twenty tokens.\n\nText.", add_special_tokens=False)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 5).token_ids == token_ids[:5]


def test_a_policy_without_an_echo_reads_nothing_again() -> None:
    tokenizer = KINDS["byte-level"]
    token_ids = tokenizer.encode("Who?\n\nA long text.", add_special_tokens=False)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 0).token_ids == ()


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("Who keeps a cat?\n\nA text.", 1.0),
        ("\u8c01\u517b\u732b\uff1f\n\nA text.", 1.0),
        ("Read this.\n\nWho keeps a cat?", 0.25),
        ("Name the cat.\n\nA text.", 0.25),
        ("", 0.25),
    ],
)
def test_a_paragraph_that_asks_counts_more(text: str, weight: float) -> None:
    tokenizer = KINDS["byte-level"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 64).weight == weight


def test_an_unknown_token_ends_the_echo() -> None:
    tokenizer = KINDS["byte-level"]
    token_ids = (*tokenizer.encode("Who", add_special_tokens=False), 10**6, 5)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 64).token_ids == token_ids[:-2]

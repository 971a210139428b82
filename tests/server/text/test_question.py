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
    echo = first_paragraph(token_ids, tokenizer.vocabulary, 20)
    assert echo == token_ids[: len(echo)]
    assert tokenizer.decode(echo) == question


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_paragraph_is_cut(kind: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode("A paragraph of more than twenty tokens.\n\nText.", add_special_tokens=False)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 5) == token_ids[:5]


def test_a_policy_without_an_echo_reads_nothing_again() -> None:
    tokenizer = KINDS["byte-level"]
    token_ids = tokenizer.encode("Who?\n\nA long text.", add_special_tokens=False)
    assert first_paragraph(token_ids, tokenizer.vocabulary, 0) == ()

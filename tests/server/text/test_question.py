"""Which tokens echo the question: the first paragraph, as the tokenizer cut it."""

import pytest

from server.text.question import Question, echoed, first_paragraph
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


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Read this.\n\nBen keeps a cat.\nWho keeps a cat?\nAnswer in one word.", "Who keeps a cat?"),
        (
            "Read this.\n\nWho asks? Ben keeps a cat. Who keeps a cat? Think.",
            "Who asks? Ben keeps a cat. Who keeps a cat?",
        ),
        ("Who asks?\n\nBen keeps a cat. Who keeps a cat?", "Who asks?\n\n"),
        ("Read this.\n\n\u8c01\u517b\u732b\uff1f \n", "\u8c01\u517b\u732b\uff1f"),
        ('Read this.\n\n"Who keeps it?" Say it.', '"Who keeps it?'),
        ("Read this.\n\n\u8c01\u517b\u732b\uff1f\u8bf7\u56de\u7b54\u3002", "\u8c01\u517b\u732b\uff1f"),
        ("Read this.\n\n<q>Who keeps it?</q> Say it.", "<q>Who keeps it?"),
        ("Read this.\n\nx = a ? b : c", "Read this.\n\n"),
        ("Read this.\n\nThe page is http://a.b/c?d=e and `x?.y`.", "Read this.\n\n"),
        ("Read this.\n\nWho keeps a cat?" + " Say it." * 200, "Read this.\n\n"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_question_before_the_last_instructions_is_found(kind: str, text: str, question: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found = echoed(Question(token_ids, token_ids), tokenizer.vocabulary, 64)
    assert tokenizer.decode(found.token_ids).strip() == question.strip()
    assert found.weight == (1.0 if "?" in question or "\uff1f" in question else 0.25)
    assert echoed(Question(token_ids, token_ids), tokenizer.vocabulary, 0).token_ids == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_line_keeps_its_end(kind: str) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode("Read.\n\n" + "And then, " * 30 + "who?", add_special_tokens=False)
    assert echoed(Question(token_ids, token_ids), tokenizer.vocabulary, 5).token_ids == token_ids[-5:]


def test_unknown_tokens_are_no_question() -> None:
    vocabulary = KINDS["byte-level"].vocabulary
    assert echoed(Question((), (len(vocabulary), -1)), vocabulary, 5).token_ids == ()

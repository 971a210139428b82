import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.shortening import (
    MARK,
    SEPARATOR,
    Passage,
    Shortening,
    Span,
    chunk_spans,
    joined,
    merged,
    shortened,
)

words = st.text(st.sampled_from("abé .!?\n},中。🙂"), max_size=300)


@st.composite
def spans_of(draw: st.DrawFn, length: int) -> list[Span]:
    pairs = draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=6))
    return [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]


@given(words, st.data())
def test_kept_spans_are_kept_in_order(text: str, data: st.DataObject) -> None:
    kept = data.draw(spans_of(len(text)))
    short = shortened(text, kept)
    position = 0
    for first, last in merged(kept, len(text)):
        position = short.index(text[first:last], position) + last - first
    # What is between the marks is the text's own, in its order.
    end = 0
    for piece in short.split(MARK):
        end = text.index(piece.strip(), end) + len(piece.strip())


@given(words, st.data())
def test_a_text_of_which_all_is_kept_stays_as_it_is(text: str, data: st.DataObject) -> None:
    borders = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=5))})
    assert shortened(text, list(itertools.pairwise(borders))) == text


@given(st.lists(st.tuples(words, st.booleans()), min_size=1, max_size=4), st.data())
def test_what_may_not_be_cut_and_what_is_protected_stays(
    contents: list[tuple[str, bool]], data: st.DataObject
) -> None:
    passages = [Passage(text, may_be_cut) for text, may_be_cut in contents]
    length = len(joined(passages))
    size = data.draw(st.integers(1, 60))
    chunks = [(first, min(first + size, length)) for first in range(0, length, size)]
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(chunks), max_size=len(chunks)))
    protected = data.draw(spans_of(length))
    shortening = Shortening(passages, chunks, scores, protected)
    texts = shortening.texts(data.draw(st.integers(0, shortening.num_chunks)))
    start = 0
    for passage, text in zip(passages, texts, strict=True):
        end = start + len(passage.text)
        assert passage.may_be_cut or text == passage.text
        for first, last in protected:
            assert passage.text[max(first - start, 0) : max(last - start, 0)] in text
        start = end + len(SEPARATOR)
    assert shortening.texts(shortening.num_chunks) == [passage.text for passage in passages]


def test_the_best_chunks_are_kept_and_ties_go_to_the_earlier_one() -> None:
    lines = [f"This is the sentence with the number {number}.\n" for number in range(6)]
    text = "".join(lines)
    size = len(lines[0])
    chunks = [(first, first + size) for first in range(0, len(text), size)]
    shortening = Shortening([Passage(text, may_be_cut=True)], chunks, [0.2, 0.1, 0.9, 0.2, 0.2, 0.3])
    assert shortening.texts(1) == [f"{MARK}\n{lines[2]}{MARK}\n"]
    assert shortening.texts(3) == [f"{lines[0]}{MARK}\n{lines[2]}{MARK}\n{lines[5]}"]
    assert shortening.texts(0) == [f"{MARK}\n"]


@pytest.mark.parametrize(
    ("before", "kept", "after", "inside"),
    [
        (
            "The first sentence is long enough. ",
            "The second has 3.14 in it. ",
            "And so has the third. " * 2,
            "3.14",
        ),
        (
            '[{"a": "one one one one one one one"}, ',
            '{"b": "two"}, ',
            '{"c": "three three three three"}]',
            "two",
        ),
        (
            "a first line that is long enough\n",
            "key = value\n",
            "a last line that is long enough too\n",
            "val",
        ),
        (
            "第一句话在这里，它足够长。" * 4,
            "第二句。",
            "第三句话在这里。" * 5,
            "二",
        ),
    ],
)
def test_sentences_records_and_lines_stay_whole(before: str, kept: str, after: str, inside: str) -> None:
    text = before + kept + after
    first = text.index(inside)
    short = shortened(text, [(first, first + len(inside))])
    assert short.split(MARK)[1].strip() == kept.strip()


def test_a_text_without_ends_is_cut_between_words() -> None:
    text = "word " * 400
    short = shortened(text, [(1001, 1042)])
    assert short == f"{MARK} word word word word word word word word word {MARK} "


def test_chunks_cover_the_text_of_their_tokens() -> None:
    # Two tokens of the template, five of the text, one of the template.
    offsets = [(0, 2), (2, 3), (4, 6), (6, 6), (6, 9)]
    assert chunk_spans(offsets, 2, 8, 3, 10) == [(0, 2), (2, 6), (6, 10)]
    assert chunk_spans(offsets, 2, 8, 2, 10) == [(0, 0), (0, 4), (4, 6), (6, 10)]
    assert chunk_spans([], 3, 5, 2, 0) == [(0, 0), (0, 0), (0, 0)]

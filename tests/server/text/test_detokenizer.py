"""Incremental text against the tokenizers' own decoding of the whole."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopString
from server.text.vocabulary import REPLACEMENT, Vocabulary
from tests.server.text.tokenizers import TEXTS, byte_level, id_of, metaspace, sentencepiece, text_of

BYTE_LEVEL, SENTENCEPIECE, GEMMA_LIKE, METASPACE = (
    byte_level(),
    sentencepiece(),
    sentencepiece(strips_space=False),
    metaspace(),
)
KINDS = [BYTE_LEVEL, SENTENCEPIECE, GEMMA_LIKE, METASPACE]
VOCABULARIES = {id(tokenizer): Vocabulary(tokenizer) for tokenizer in KINDS}

any_text = st.text("aehlo wörld日本🙂\n.", max_size=20) | st.sampled_from(TEXTS)


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return VOCABULARIES[id(tokenizer)]


def pieces_of(detokenizer: Detokenizer, groups: list[list[int]]) -> list[str]:
    """Return the pieces that come after each group of tokens, up to a stop string."""
    pieces: list[str] = []
    for group in groups:
        for token_id in group:
            if detokenizer.push(token_id):
                return [*pieces, detokenizer.pull().text]
        pieces.append(detokenizer.pull().text)
    return [*pieces, detokenizer.end().text]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


def ids_of(tokenizer: PreTrainedTokenizerFast) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer) - 1), max_size=24)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
@given(data=st.data())
def test_incremental_text_equals_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool, data: st.DataObject
) -> None:
    ids = data.draw(ids_of(tokenizer))
    detokenizer = Detokenizer(vocabulary_of(tokenizer), skip_special_tokens=skip_special_tokens)
    assert "".join(pieces_of(detokenizer, one_by_one(ids))) == text_of(
        tokenizer, ids, skip_special_tokens=skip_special_tokens
    )


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, GEMMA_LIKE])
@given(data=st.data())
def test_any_ids_with_byte_tokens(tokenizer: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    """Valid text equals the tokenizer's. Of invalid text, only the invalid bytes are replaced."""
    ids = data.draw(ids_of(tokenizer))
    text = "".join(pieces_of(Detokenizer(vocabulary_of(tokenizer)), one_by_one(ids)))
    whole = text_of(tokenizer, ids, skip_special_tokens=True)
    if REPLACEMENT not in whole:
        assert text == whole
    kept = [
        token for token in tokenizer.convert_ids_to_tokens(ids) if token not in tokenizer.all_special_tokens
    ]
    joined = b"".join(
        bytes([int(token[3:5], 16)]) if re.fullmatch("<0x..>", token) else token.encode() for token in kept
    )
    assert text.lstrip(" ") == joined.decode(errors="replace").replace("▁", " ").lstrip(" ")


@pytest.mark.parametrize("tokenizer", KINDS)
@given(text=any_text)
def test_text_round_trips_without_half_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(vocabulary_of(tokenizer)), one_by_one(ids))
    assert "".join(pieces) == text_of(tokenizer, ids, skip_special_tokens=True)
    if tokenizer is not METASPACE:  # which has no token for characters that it did not see
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", KINDS)
def test_going_on_with_a_text_keeps_the_space(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenizer.encode("hello again", add_special_tokens=False)
    for cut in range(1, len(whole)):
        detokenizer = Detokenizer(vocabulary_of(tokenizer), continues_text=True)
        assert text_of(tokenizer, whole[:cut]) + "".join(
            pieces_of(detokenizer, one_by_one(whole[cut:]))
        ) == text_of(tokenizer, whole)


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    detokenizer = Detokenizer(vocabulary_of(SENTENCEPIECE))
    detokenizer.push(id_of(SENTENCEPIECE, "<0xE2>"))
    assert detokenizer.pull().text == ""
    assert detokenizer.end().text == REPLACEMENT


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[list[int]], list[str]]:
    """Draw ids of a text in groups, and stop strings, some of which are in the text."""
    text = draw(any_text)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False) + draw(ids_of(BYTE_LEVEL))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=5)) | {0, len(ids)})
    inside = st.builds(
        lambda start, size: text[start : start + size], st.integers(0, 20), st.integers(1, 4)
    ).filter(bool)
    return [ids[a:b] for a, b in pairwise(cuts)], draw(
        st.lists(inside | st.text("elo ", min_size=1, max_size=3), max_size=3)
    )


def cut_at_stop(text: str, strings: list[str], *, include: bool) -> str:
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return text


@settings(max_examples=300)
@given(grouped(), st.booleans())
def test_text_does_not_depend_on_how_tokens_are_grouped(
    case: tuple[list[list[int]], list[str]], include: bool
) -> None:
    groups, strings = case
    ids = [token_id for group in groups for token_id in group]
    stop = [StopString(string) for string in strings]
    expected = cut_at_stop(text_of(BYTE_LEVEL, ids, skip_special_tokens=True), strings, include=include)
    for grouping in (groups, [ids], one_by_one(ids)):
        detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), stop, include_stop_string=include)
        assert "".join(pieces_of(detokenizer, grouping)) == expected


@given(grouped())
def test_tokens_are_released_with_their_last_character(case: tuple[list[list[int]], list[str]]) -> None:
    groups, strings = case
    ids = [token_id for group in groups for token_id in group]
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), [StopString(string) for string in strings])
    emitted, num_released, has_stopped = "", 0, False
    for token_id in ids:
        has_stopped = detokenizer.push(token_id)
        piece = detokenizer.pull()
        emitted, num_released = emitted + piece.text, num_released + piece.num_tokens
        if has_stopped:
            break
        released = text_of(BYTE_LEVEL, ids[:num_released], skip_special_tokens=True)
        assert emitted.startswith(released.rstrip(REPLACEMENT))  # a character may end in the next token
    num_released += detokenizer.end().num_tokens
    assert num_released == detokenizer.num_tokens
    assert has_stopped or num_released == len(ids)


def test_the_answer_ends_at_the_token_that_completes_the_stop_string() -> None:
    ids = [id_of(BYTE_LEVEL, char) for char in "abcdefg"]
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), [StopString("cde")])
    results = [detokenizer.push(token_id) for token_id in ids[:5]]
    assert results == [False, False, False, False, True]
    assert (detokenizer.num_tokens, detokenizer.stop_string, detokenizer.pull().text) == (5, "cde", "ab")


def test_stop_strings_count_from_min_tokens_on() -> None:
    ids = [id_of(BYTE_LEVEL, char) for char in "abab"]
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), [StopString("ab")], min_tokens=3)
    assert [detokenizer.push(token_id) for token_id in ids] == [False, False, False, True]
    assert detokenizer.pull().text == "ab"

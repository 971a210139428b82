"""The search of a growing text against `re`, which searches the whole of it each time."""

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer
from server.text.stop_regex import StopRegex, StopRegexError
from server.text.stop_strings import StopString

PATTERNS = ["a+b", r"\d{2}-\d", "(?i)the end", "é|日本", "(a|ab)(c|bcd)", r"[^a]\n", "(?:ab){2,3}", r"x.y"]

texts = st.text("abcdé日本12-\nxyTHEthe nd🙂", max_size=40)


class _Pieces:
    """A vocabulary whose tokens are the pieces of one text."""

    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id].encode()

    first_token_bytes = token_bytes


def first_end(pattern: str, text: str) -> int | None:
    for end in range(1, len(text) + 1):
        if any(re.compile(pattern).fullmatch(text, start, end) for start in range(end)):
            return end
    return None


@given(st.sampled_from(PATTERNS), texts, st.integers(0, 40))
def test_finds_the_same_as_a_search_of_the_whole_text(pattern: str, text: str, cut: int) -> None:
    search = StopRegex(pattern)
    found = search.feed(text[:cut])
    if found is None and (rest := search.feed(text[cut:])) is not None:
        found = min(cut, len(text)) + rest
    assert found == first_end(pattern, text)


@pytest.mark.parametrize("pattern", ["a*", "", "[", "^a", "a$", r"\bthe\b", "(?=a)b", r"(a)\1", "a)|(?:b"])
def test_an_expression_that_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises(StopRegexError):
        StopRegex(pattern)


@pytest.mark.parametrize("pattern", [r"[$^]a", r"\$\d"])
def test_signs_that_are_no_anchors(pattern: str) -> None:
    assert StopRegex(pattern).feed("x$a $5") is not None


def test_an_automaton_that_grows_too_large_is_an_error_and_harms_no_other() -> None:
    pattern = "(a|b)*a(a|b){60}c"
    text = "".join(random.Random(0).choices("ab", k=4000))
    other = StopRegex(pattern)
    with pytest.raises(StopRegexError, match="too complex"):
        StopRegex(pattern).feed(text)
    assert other.feed("a" + "b" * 60 + "c") == 62


@pytest.mark.parametrize("cuts", [range(1, 17), [3], [5, 9], []])
@pytest.mark.parametrize(
    ("stops", "regexes", "expected", "stop"),
    [
        ([], [r"\d+"], "one 1", r"\d+"),
        ([], ["three", r"\d \w"], "one 12 t", r"\d \w"),
        (["12"], ["two"], "one ", "12"),
        (["two"], [r"\d\d"], "one 12", r"\d\d"),
        (["2"], ["12"], "one 1", "2"),
        (["12 two"], ["2 "], "one 12 ", "2 "),
    ],
)
def test_the_text_ends_behind_the_match(
    stops: list[str], regexes: list[str], expected: str, stop: str, cuts: Sequence[int]
) -> None:
    """However the text is cut into tokens."""
    text = "one 12 two three"
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    searches = list(map(StopRegex, regexes))
    detokenizer = Detokenizer(_Pieces(pieces), [StopString(text) for text in stops], searches)  # type: ignore[arg-type]
    found = ""
    for index in range(len(pieces)):
        if detokenizer.push(index):
            break
        found += detokenizer.pull().text
    assert found + detokenizer.end().text == expected
    assert detokenizer.stop_string == stop

"""The search of a growing text against `re`, which searches the whole of it each time."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer
from server.text.stop_regex import StopRegex, StopRegexError
from server.text.stop_strings import StopString
from server.text.vocabulary import Vocabulary
from tests.server.text.tokenizers import byte_level

PATTERNS = ["a+b", r"\d{2}-\d", "(?i)the end", "é|日本", "(a|ab)(c|bcd)", r"[^a]\n", "(?:ab){2,3}", r"x.y"]
SEARCHES = {pattern: StopRegex.compile(pattern) for pattern in PATTERNS}
VOCABULARY = Vocabulary(byte_level())

texts = st.text("abcdé日本12-\nxyTHEthe nd🙂", max_size=40)


def first_end(pattern: str, text: str) -> int | None:
    for end in range(1, len(text) + 1):
        if any(re.compile(pattern).fullmatch(text, start, end) for start in range(end)):
            return end
    return None


@given(st.sampled_from(PATTERNS), texts, st.integers(0, 40))
def test_finds_the_same_as_a_search_of_the_whole_text(pattern: str, text: str, cut: int) -> None:
    search = SEARCHES[pattern].copy()
    found = search.feed(text[:cut])
    if found is None and (rest := search.feed(text[cut:])) is not None:
        found = min(cut, len(text)) + rest
    assert found == first_end(pattern, text)


@pytest.mark.parametrize("pattern", ["a*", "", "[", "^a", r"\bthe\b", "(?=a)b", r"(a)\1"])
def test_an_expression_that_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises(StopRegexError):
        StopRegex.compile(pattern)


def test_an_automaton_without_bounds_is_given_up_and_begun_again() -> None:
    search = StopRegex.compile("(a|b)*a(a|b){60}c|end")
    text = "".join("ab"[(index * index // 7) % 2] for index in range(40_000))
    assert search.feed(text) is None
    assert search.feed("the end") == 7


@pytest.mark.parametrize(
    ("stops", "regexes", "expected", "stop"),
    [
        ([], [r"\d+"], "one 1", r"\d+"),
        ([], ["three", r"\d \w"], "one 12 t", r"\d \w"),
        (["12"], ["two"], "one ", "12"),
        (["two"], [r"\d\d"], "one 12", r"\d\d"),
        (["2"], ["12"], "one 1", "2"),
    ],
)
def test_the_text_ends_behind_the_match(
    stops: list[str], regexes: list[str], expected: str, stop: str
) -> None:
    detokenizer = Detokenizer(
        VOCABULARY, [StopString(text) for text in stops], list(map(StopRegex.compile, regexes))
    )
    text = ""
    for token_id in byte_level().encode("one 12 two three", add_special_tokens=False):
        if detokenizer.push(token_id):
            break
        text += detokenizer.pull().text
    assert text + detokenizer.end().text == expected
    assert detokenizer.stop_string == stop

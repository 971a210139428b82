"""The matcher against a search that looks at the whole text each time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop_strings import StopMatcher, StopString

texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, strings: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(texts, stops, st.integers(0, 30))
def test_finds_the_same_as_a_search_of_the_whole_text(text: str, strings: list[str], cut: int) -> None:
    matcher = StopMatcher([StopString(string) for string in strings])
    found = matcher.feed(text[:cut])
    if found is None and (rest := matcher.feed(text[cut:])) is not None:
        found = (min(cut, len(text)) + rest[0], rest[1])
    assert found == first_match(text, strings)


@given(texts, stops)
def test_holds_back_only_a_possible_beginning(text: str, strings: list[str]) -> None:
    matcher = StopMatcher([StopString(string) for string in strings])
    if matcher.feed(text) is None:
        beginnings = [
            string[:n] for string in strings for n in range(1, len(string)) if text.endswith(string[:n])
        ]
        assert matcher.num_held == max(map(len, beginnings), default=0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopString("")

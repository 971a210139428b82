"""Reasoning between tags: it is separated from content, for any split of the text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsers.parts import Content, Reasoning
from server.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from tests.server.parsers.test_tool_calls import split

CASES: list[tuple[bool, str, str, str]] = [
    (False, "<think>\nIt is 4.\n</think>\n\nFour.", "It is 4.", "Four."),
    (False, "  <think>a</think>b</think>c", "a", "b</think>c"),
    (False, "Four <think>.", "", "Four <think>."),
    (False, " <thin", "", " <thin"),
    (False, "<think>never ends ", "never ends", ""),
    (False, "<think></think>", "", ""),
    (False, "", "", ""),
    (True, "\nIt is 4.\n\n</think>\n\nFour. ", "It is 4.", "Four. "),
    (True, "a </thin </think>", "a </thin", ""),
    (True, "a < b", "a < b", ""),
    (True, "</think>Four", "", "Four"),
]


def read(parts: Sequence[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_FORMATS["think"], is_open=is_open)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.end()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), CASES)
def test_every_split_in_two_gives_the_same(is_open: bool, text: str, reasoning: str, content: str) -> None:
    assert read(list(text), is_open=is_open) == (reasoning, content)
    for cut in range(len(text) + 1):
        assert read(split(text, [cut]), is_open=is_open) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "think>", " ", "\n", "a"]), max_size=15),
    st.data(),
    st.booleans(),
)
def test_every_split_of_any_text_gives_the_same_parts(
    parts: list[str], data: st.DataObject, is_open: bool
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert read(split(text, cuts), is_open=is_open) == read([text], is_open=is_open)

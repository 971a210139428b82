"""Calls in the formats of model families: what is found, and that no way of cutting the text changes it."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.tool_calls import ToolCallParser, merged
from server.parsers.tool_format import TOOL_FORMATS

NAMES = ("get_weather", "f")
Call = tuple[str, str]

TEXTS: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        (
            'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": '
            '"}</tool_call>\\"{"}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "get_weather"}</tool_call>'
        ),
        "Let me see.",
        [("f", '{"a": "}</tool_call>\\"{"}'), ("get_weather", "{}")],
    ),
    ("hermes", "a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> ok',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> ok',
        [],
    ),
    ("hermes", "<tool_call>oh</tool_call> no", "<tool_call>oh</tool_call> no", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": {"b": [{}]}}}', "", [("f", '{"a": {"b": [{}]}}')]),
    (
        "llama3_json",
        ' {"name": "f", "parameters": {}}; {"name": "f", "parameters": {"x": 2}}',
        "",
        [("f", "{}"), ("f", '{"x": 2}')],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3} is he', '{"name": "Bob", "age": 3} is he', []),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    ("mistral", 'I do. [TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}]', "I do.", [("f", '{"a": 1}')]),
    (
        "mistral_v11",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    (
        "deepseek_v3",
        (
            "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": "```"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "Well.",
        [("f", '{"a": "```"}'), ("get_weather", "{}")],
    ),
    (
        "deepseek_v31",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    (
        "json",
        '[{"name": "f", "arguments": {"a": null}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": null}'), ("f", "{}")],
    ),
    ("json", '{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("json", "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
    ("json", "  \n", "  \n", []),
]


def parse(name: str, parts: Sequence[str]) -> list[Part]:
    parser = ToolCallParser(TOOL_FORMATS[name], NAMES)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return merged([*pieces, *parser.end()])


def calls_of(pieces: Sequence[Part]) -> tuple[str, list[Call]]:
    content, calls = "", list[Call]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case CallStart(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = calls[-1][0], calls[-1][1] + text
    return content, calls


def split(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
def test_found_calls_equal_the_expected_ones(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert calls_of(parse(name, [text])) == (content, calls)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in TEXTS])
def test_character_by_character_and_every_cut_in_two_find_the_same(name: str, text: str) -> None:
    whole = parse(name, [text])
    assert parse(name, list(text)) == whole
    for cut in range(len(text)):
        assert parse(name, split(text, [cut])) == whole


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(alphabet='ab"\\{}[]<>/`｜ é🙂\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='ab"\\:{', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(alphabet="xyz", min_size=1, max_size=3), JSON_VALUES, max_size=3)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_split_of_random_calls_gives_the_calls(name: str, data: st.DataObject) -> None:
    calls = [
        (tool, json.dumps(arguments, ensure_ascii=False))
        for tool, arguments in data.draw(
            st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
        )
    ]
    text = TOOL_FORMATS[name].write(calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert calls_of(parse(name, split(text, cuts))) == ("", calls)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_split_of_any_text_gives_the_same(name: str, data: st.DataObject) -> None:
    tool_format = TOOL_FORMATS[name]
    parts = [
        "{",
        "}",
        '"',
        "[",
        "]",
        ":",
        ",",
        " ",
        "\n",
        "x",
        '"name"',
        '"f"',
        '{"name": "f",',
        tool_format.opening,
        tool_format.closing,
    ]
    parts += [
        f'"{tool_format.arguments_key}"',
        tool_format.before,
        tool_format.after,
        tool_format.opening[:4],
        "\\",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=25)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parse(name, split(text, cuts)) == parse(name, [text])

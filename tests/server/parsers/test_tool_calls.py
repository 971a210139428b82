"""Calls in the formats of model families: what is found, and that no way of cutting the text changes it."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers.answer_reader import AnswerReader
from server.parsers.harmony import HarmonyParser
from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.tool_calls import ToolCallParser, merged
from server.parsers.tool_format import TOOL_FORMATS

NAMES = ("get_weather", "f")
Call = tuple[str, str]
# A text, and values that a format without quotes cannot confuse with one.
SCHEMA = {"properties": {"a": {}, "x": {"type": "string"}, "y": {"type": ["object", "array", "null"]}}}

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
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> ok', " ok", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call>.', ".", [("f", '{"a": [1]}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1</tool_call>',
        "",
        [("f", '{"a": {"b": 1}}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>',
        "",
        [("f", '{"a": "1\\n2"}')],
    ),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (
        "kimi_k2",
        (
            "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1 '
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        "Well.",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": [1]}}]', "", [("f", '{"a": [1]}')]),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f"}]<|/tool_call|>',
        "",
        [("f", "{}"), ("f", "{}")],
    ),
    (
        "qwen3_coder",
        (
            'I write.\n\n<tool_call>\n<function=f>\n<parameter=x>\na <b>\n"c"\n\n</parameter>\n'
            "<parameter=y>\n[1, true]\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
        ),
        "I write.",
        [("f", '{"x": "a <b>\\n\\"c\\"\\n", "y": [1, true]}'), ("get_weather", "{}")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter></tool_call>!",
        "!",
        [("f", '{"a": 1}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=rm></function></tool_call>",
        "<tool_call><function=rm></function></tool_call>",
        [],
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>half", "", [("f", '{"x": "ha')]),
    (
        "glm45",
        (
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a</arg_key>\n"
            "<arg_value>True</arg_value>\n</tool_call>"
        ),
        "",
        [("f", '{"x": "1", "a": true}')],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>x</arg_key><arg_value>  1 </arg_value></tool_call><tool_call>f</tool_call>",
        "",
        [("f", '{"x": "  1 "}'), ("f", "{}")],
    ),
    (
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">a\nb</parameter>\n'
            '<parameter name="a">half [</parameter>\n</invoke>\n<invoke name="get_weather">\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        "",
        [("f", '{"x": "a\\nb", "a": "half ["}'), ("get_weather", "{}")],
    ),
    (
        "pythonic",
        "[f(x='it\\'s', a={'b': [1, None, (2,)]}), get_weather()]",
        "",
        [("f", '{"x": "it\'s", "a": {"b": [1, null, [2]]}}'), ("get_weather", "{}")],
    ),
    ("pythonic", '[f("1", -2.5)]', "", [("f", '{"a": "1", "x": -2.5}')]),
    ("pythonic", "[see the docs](http://f(a=1))", "[see the docs](http://f(a=1))", []),
    ("pythonic", "[1, 2] and f(a=1)", "[1, 2] and f(a=1)", []),
    (
        "olmo3",
        "Well.\n<function_calls>\nf(x='a', a=null)\nget_weather(y=[true])\n</function_calls>",
        "Well.",
        [("f", '{"x": "a", "a": null}'), ("get_weather", '{"y": [true]}')],
    ),
    (
        "function_gemma",
        '<start_function_call>call:f{x:<escape>a,}"<escape>,a:{b:[1,<escape>c<escape>]}}<end_function_call>',
        "",
        [("f", '{"x": "a,}\\"", "a": {"b": [1, "c"]}}')],
    ),
    ("gemma4", '<|tool_call>call:f{x:<|"|>a<|"|>}<tool_call|>', "", [("f", '{"x": "a"}')]),
    ("harmony", "Hello.", "Hello.", []),
    ("harmony", "<|channel|>final<|message|>Hello.", "Hello.", []),
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>commentary<|message|>I "
            "ask.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"a": 1}<|call|>'
        ),
        "I ask.",
        [("f", '{"a": 1}')],
    ),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>", "", [("f", "{}")]),
    ("harmony", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>", "{}", []),
    ("json", "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
    ("json", "  \n", "  \n", []),
]


def parse(name: str, parts: Sequence[str]) -> list[Part]:
    tools = dict.fromkeys(NAMES, SCHEMA)
    if name == "harmony":
        reader = AnswerReader(HarmonyParser(tools), None)
    else:
        reader = AnswerReader(None, ToolCallParser(TOOL_FORMATS[name], tools))
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return merged([*pieces, *reader.end()])


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
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.text(alphabet='ab"\\{}[]<>/`｜ é🙂\n1', max_size=8),
        "y": st.none()
        | st.lists(JSON_VALUES, max_size=3)
        | st.dictionaries(st.text("ab"), JSON_VALUES, max_size=3),
    },
)


def drawn_calls(data: st.DataObject) -> list[Call]:
    calls = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
    return [(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in data.draw(calls)]


def same(name: str, arguments: str, expected: str) -> bool:
    """Return whether arguments are the expected ones. Those that are JSON already are not changed."""
    if TOOL_FORMATS[name].style is None:
        return arguments == expected
    return bool(json.loads(arguments) == json.loads(expected))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_split_of_random_calls_gives_the_calls(name: str, data: st.DataObject) -> None:
    calls = drawn_calls(data)
    text = TOOL_FORMATS[name].write(calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    content, found = calls_of(parse(name, split(text, cuts)))
    assert content == ""
    assert [tool for tool, _ in found] == [tool for tool, _ in calls]
    assert all(same(name, *pair) for pair in zip((a for _, a in found), (b for _, b in calls), strict=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_truncation_of_random_calls_gives_their_beginning(name: str, data: st.DataObject) -> None:
    text = TOOL_FORMATS[name].write(drawn_calls(data))
    _, whole = calls_of(parse(name, [text]))
    content, calls = calls_of(parse(name, [text[: data.draw(st.integers(0, len(text)))]]))
    assert content in text
    assert len(calls) <= len(whole)
    if calls:
        *complete, (last, arguments) = calls
        assert complete == whole[: len(complete)]
        assert last == whole[len(complete)][0]
        # A message of harmony's that has no text yet is a call without arguments.
        is_empty = name == "harmony" and arguments == "{}"
        assert is_empty or whole[len(complete)][1].startswith(arguments)


@settings(max_examples=100, deadline=None)
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
        tool_format.before.replace("{name}", "f"),
        *tool_format.markers.split("\n"),
        "\\",
        "'",
        "(",
        ")",
        "=",
        "f",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=25)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parse(name, split(text, cuts)) == parse(name, [text])

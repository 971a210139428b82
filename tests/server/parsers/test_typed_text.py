"""Values without quotes get the type of their schema, however the schema is written."""

from typing import Any

import pytest

from server.parsers.literals import QUOTES, json_of
from server.parsers.typed_text import typed, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "text": {"type": "string"},
        "self": {"anyOf": [{"$ref": "#/$defs/self"}] * 60},
        "both": {"oneOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
        "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"$ref": "#/$defs/text"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null", 5]}, {"integer", "null"}),
        ({"$ref": "#/$defs/text"}, {"string"}),
        ({"$ref": "#/$defs/both"}, {"string", "null"}),
        ({"$ref": "#/$defs/deep"}, {"string"}),
        ({"$ref": "#/$defs/self"}, set()),
        ({"$ref": "#/$defs/none"}, set()),
        ({"allOf": [{"type": "object"}]}, {"object"}),
        ({"enum": ["a", 1, 2.5, None, True]}, {"string", "integer", "number", "null", "boolean"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"anyOf": [{"const": number} for number in range(100)]}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_the_types_of_a_schema(schema: object, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("1", {"string"}, '"1"'),
        ("1", {"integer"}, "1"),
        ("1", {"number"}, "1"),
        ("1.0", {"integer"}, "1.0"),
        ("1", set(), "1"),
        ("None", {"string", "null"}, "null"),
        ("none of it", {"string", "null"}, '"none of it"'),
        ("{'a': [True, (1,)]}", {"object"}, '{"a": [true, [1]]}'),
        ("{oh", {"object"}, '"{oh"'),
        ("1", {"boolean"}, '"1"'),
        ("", set(), '""'),
    ],
)
def test_a_value_has_an_allowed_type(text: str, types: set[str], value: str) -> None:
    assert typed(text, frozenset(types)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s'", '"it\'s"'),
        (r"'\x41\u00e9\d'", '"Aé\\\\d"'),
        (r'"\ud83d\ude42"', '"🙂"'),
        (r'"\ud83d"', '"�"'),
        ("[1, 2,]", "[1, 2]"),
        ("{a: 1}", '{"a": 1}'),
        ("-0.5e3", "-500.0"),
        ("NaN", '"NaN"'),
        ("1 2", None),
        ("f(x)", None),
        ("[" * 100_000, None),
        ("[" * 5000 + "]" * 5000, None),
        ("9" * 5000, f'"{"9" * 5000}"'),
        ("", None),
    ],
)
def test_literals_become_json_or_nothing(text: str, value: str | None) -> None:
    assert json_of(text, QUOTES) == value

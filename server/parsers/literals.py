"""Values that models write as in Python, JavaScript or JSON, as JSON.

Nothing is evaluated. Strings are between one of several delimiters; words are True, none, 1.5 or a key.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

QUOTES: Final = ('"', "'")  # delimiters in which a backslash escapes
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def json_of(text: str, delimiters: Sequence[str]) -> str | None:
    """Return a literal as JSON, or None if it is none. `delimiters` are those of strings."""
    written: list[str] = []
    is_key = False  # whether the last token can only be a key
    position = 0
    pattern = _tokens(delimiters)
    while position < len(text):
        token = pattern.match(text, position)
        if token is None:
            return None
        position = token.end()
        found = token[0]
        if found.isspace():
            continue
        if is_key and found != ":":
            return None
        is_key = False
        if token["mark"]:
            if found in ")]}" and written and written[-1] == ",":
                written.pop()
            written.append({"(": "[", ")": "]", "=": ":"}.get(found, found))
        elif token["word"]:
            word = _WORDS.get(found, found)
            is_key = _value_of(word) is _NOTHING
            written.append(json.dumps(word) if is_key else word)
        else:
            written.append(json.dumps(_unquoted(found, delimiters), ensure_ascii=False))
    value = _value_of(" ".join(written))
    try:
        return None if value is _NOTHING else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return None


class _Nothing:
    """No JSON."""


_NOTHING: Final = _Nothing()


def _value_of(text: str) -> Any:
    """Return the value of JSON, or `_NOTHING`. NaN and infinities are none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def well_formed(text: str) -> str:
    """Return a text with surrogate pairs joined and lone ones replaced: UTF-8 has no surrogates."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _tokens(delimiters: Sequence[str]) -> re.Pattern[str]:
    strings = "|".join(
        rf"{mark}(?:\\.|[^{mark}\\])*{mark}" if mark in QUOTES else f"{re.escape(mark)}.*?{re.escape(mark)}"
        for mark in delimiters
    )
    return re.compile(rf"\s+|(?P<mark>[\[\]{{}}(),:=])|{strings}|(?P<word>[\w.+-]+)", re.DOTALL)


def _unquoted(text: str, delimiters: Sequence[str]) -> str:
    mark = next(mark for mark in delimiters if text.startswith(mark))
    inner = text[len(mark) : -len(mark)]
    return well_formed(_ESCAPE.sub(_unescaped, inner)) if mark in QUOTES else inner


def _unescaped(escape: re.Match[str]) -> str:
    name = escape[1]
    if len(name) > 1:
        code = int(name[1:], 16)
        return chr(code) if code < 0x110000 else escape[0]
    if name in _ESCAPED:
        return _ESCAPED[name]
    return name if name in "\\'\"/" else escape[0]

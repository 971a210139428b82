"""Arguments as keywords: `city="Oslo", days=3)`, or `city:<escape>Oslo<escape>,days:3}`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.parsers.argument_style import CallReader, Parameters
from server.parsers.literals import QUOTES, json_of
from server.parsers.tagged_arguments import text_rule
from server.parsers.typed_text import properties_of
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class KeywordStyle:
    """Each argument is its name, `equals` and its value. Strings are between one of the `delimiters`.

    Values are read as Python or JSON, and written as JSON. With another first delimiter than quotes, strings
    are written without escapes. The call ends with `end`.
    """

    begins: str
    end: str
    equals: str
    between: str
    delimiters: Sequence[str] = QUOTES

    @property
    def markers(self) -> str:
        return "\n".join(self.delimiters)

    def reader(self, schema: Mapping[str, Any]) -> CallReader:
        return _KeywordReader(self, schema)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return self.between.join(
            f"{name}{self.equals}{self._written(value)}" for name, value in arguments.items()
        )

    def lark(self, rule: str, parameters: Parameters, literal: Callable[[str], str]) -> list[str]:
        # `rule_I_first`: the arguments from the I-th on, if none precedes; `rule_I_more`: if one does.
        rules: list[str] = []
        each = parameters.each()
        for index, (name, value, is_required) in enumerate(each):
            before, after = literal(f"{name}{self.equals}"), f"{rule}_{index + 1}_more"
            other = "" if is_required else f" | {rule}_{index + 1}_first"
            optional = "" if is_required else "?"
            rules.append(f"{rule}_{index}_first: {rule}_{index} {after}{other}")
            rules.append(f"{rule}_{index}_more: ({literal(self.between)} {rule}_{index}){optional} {after}")
            rules.append(f"{rule}_{index}: {before} {rule}_{index}_value")
            rules += self._value_rules(f"{rule}_{index}_value", name, value, parameters, literal)
        rules += [f'{rule}_{len(each)}_{end}: ""' for end in ("first", "more")]
        return [f"{rule}: {rule}_0_first", *rules]

    def _value_rules(
        self,
        rule: str,
        name: str,
        value: Mapping[str, Any],
        parameters: Parameters,
        literal: Callable[[str], str],
    ) -> list[str]:
        mark = self.delimiters[0]
        if mark in QUOTES or not parameters.is_text(value):
            return [f"{rule}: {parameters.value(value)}"]
        texts = parameters.texts(name, value)
        return [
            f"{rule}: {literal(mark)} {rule}_text",
            *text_rule(f"{rule}_text", texts, literal(mark), literal),
        ]

    def _written(self, value: object) -> str:
        mark = self.delimiters[0]
        if mark in QUOTES:
            return json.dumps(value, ensure_ascii=False)
        match value:
            case str():
                return f"{mark}{value}{mark}"
            case Mapping():
                items = (f"{self._written(str(key))}:{self._written(item)}" for key, item in value.items())
                return "{" + ",".join(items) + "}"
            case list():
                return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)


class _KeywordReader:
    """Reads arguments from the opening bracket to its closing one. Each is returned when it is complete."""

    def __init__(self, style: KeywordStyle, schema: Mapping[str, Any]) -> None:
        self.name: str | None = None
        self.is_complete = False
        self._style = style
        self._names = list(properties_of(schema))
        self._depth = 0
        self._delimiter: str | None = None  # of the string that is being read
        self._is_escaped = False
        self._openings = self._matcher(style.delimiters)
        self._closing = self._matcher(())
        self._key: str | None = None
        self._text: list[str] = []  # of the key or value that is being read
        self._num_arguments = 0
        self._fresh: list[str] = []

    @property
    def is_in_text(self) -> bool:
        return self._delimiter is not None

    def take_arguments(self) -> str:
        fresh = "".join(self._fresh)
        self._fresh = []
        return fresh

    def repair(self) -> None:
        """End the call without its closing bracket: without the argument that it may have cut."""
        self._fresh.append("}" if self._num_arguments else "{}")
        self.is_complete = True

    def feed(self, char: str) -> None:
        assert not self.is_complete
        if self._delimiter is not None:
            self._text.append(char)
            self._read_string(char)
            return
        opening = self._openings.feed(char)
        if opening is not None:
            self._text.append(char)
            self._delimiter = opening[1]
            self._is_escaped = False
            self._closing = self._matcher((opening[1],))
        elif char in "([{":
            if self._depth:
                self._text.append(char)
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_argument()
                self.repair()
            else:
                self._text.append(char)
        elif self._depth == 1 and char == ",":
            self._end_argument()
        elif self._depth == 1 and char == self._style.equals and self._key is None:
            self._key = "".join(self._text).strip(_SPACE)
            self._text = []
        else:
            self._text.append(char)

    def _read_string(self, char: str) -> None:
        if self._delimiter not in QUOTES:
            is_end = self._closing.feed(char) is not None
        else:
            is_end = char == self._delimiter and not self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
        if is_end:
            self._delimiter = None
            self._openings = self._matcher(self._style.delimiters)

    def _end_argument(self) -> None:
        text = "".join(self._text).strip(_SPACE)
        key = self._key
        if key is None and text and self._num_arguments < len(self._names):
            key = self._names[self._num_arguments]  # an argument by its position
        if key is not None and text:
            delimiters = (*self._style.delimiters, *QUOTES[:1])
            key = json_of(key, delimiters) or json.dumps(key, ensure_ascii=False)
            key = key if key.startswith('"') else json.dumps(key)
            value = json_of(text, delimiters) or json.dumps(text, ensure_ascii=False)
            self._fresh.append(("{" if self._num_arguments == 0 else ", ") + f"{key}: {value}")
            self._num_arguments += 1
        self._key = None
        self._text = []

    @staticmethod
    def _matcher(strings: Sequence[str]) -> StopMatcher:
        return StopMatcher([StopString(string) for string in strings])

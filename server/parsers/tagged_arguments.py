"""Arguments between tags, one parameter after the other: texts have no quotes, other values are JSON."""

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.argument_style import CallReader, Parameters
from server.parsers.typed_text import properties_of, typed, types_of
from server.text.stop_strings import StopMatcher, StopString


@dataclass(frozen=True, slots=True)
class TaggedStyle:
    """Each parameter is `key_start`, its name, `key_end`, `value_start`, its value and `value_end`.

    `space` follows each parameter. The line breaks of `trim` beside a value do not belong to it. The call
    ends with `end`.
    """

    begins: str
    key_start: str
    key_end: str
    value_end: str
    end: str
    between: str = ""  # a key and its value, where a model writes it
    value_start: str = ""
    trim: str = ""
    space: str = "\n"

    @property
    def markers(self) -> str:
        return "\n".join((self.key_start, self.key_end, self.value_start, self.value_end))

    def reader(self, schema: Mapping[str, Any]) -> CallReader:
        return _TaggedReader(self, schema)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return "".join(
            self._before(name)
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + self._after
            for name, value in arguments.items()
        )

    def lark(self, rule: str, parameters: Parameters, literal: Callable[[str], str]) -> list[str]:
        rules: list[str] = []
        names: list[str] = []
        for index, (name, value, is_required) in enumerate(parameters.each()):
            names.append(f"{rule}_{index}" if is_required else f"{rule}_{index}?")
            before, after = literal(self._before(name)), literal(self._after)
            if parameters.is_text(value):
                texts = parameters.texts(name, value)
                body = text_rule(f"{rule}_text_{index}", texts, after, literal)
            else:
                body = [f"{rule}_text_{index}: {rule}_json_{index} {after}"]
                body.append(f"{rule}_json_{index}: {parameters.value(value)}")
            rules += [f"{rule}_{index}: {before} {rule}_text_{index}", *body]
        parts = " ".join(names) if names else '""'
        return [f"{rule}: {parts}", *rules]

    def _before(self, name: str) -> str:
        return self.key_start + name + self.key_end + self.between + self.value_start + self.trim

    @property
    def _after(self) -> str:
        return self.trim + self.value_end + self.space


def text_rule(rule: str, texts: list[str] | None, after: str, literal: Callable[[str], str]) -> list[str]:
    """Return the rule of a text without quotes, up to `after`: one of several, or any."""
    if texts is not None:
        return [f"{rule}: ({' | '.join(map(literal, texts))}) {after}"]
    if after.startswith("<["):
        return [f"{rule}: /(?s:.*)/ {after}"]
    end, _, rest = after.partition(" ")
    if "<[" in rest:
        return [f"{rule}: {rule}_body {rest}", f"{rule}_body[suffix={end}]: /(?s:.*)/"]
    return [f"{rule}[suffix={after}]: /(?s:.*)/"]


class _State(enum.Enum):
    BETWEEN = enum.auto()
    KEY = enum.auto()
    GAP = enum.auto()  # between a key and its value
    VALUE = enum.auto()


class _TaggedReader:
    """Reads parameters up to the end of a call. Texts are returned as they arrive."""

    def __init__(self, style: TaggedStyle, schema: Mapping[str, Any]) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_in_text = False
        self._style = style
        self._schema = schema
        self._properties = properties_of(schema)
        self._fresh: list[str] = []
        self._num_keys = 0
        self._types: frozenset[str] = frozenset()
        self._text = ""  # the end of the text that is being read: it may begin a marker
        self._collected: list[str] = []  # the beginning of a key, or of a value that is no string
        self._has_begun = False  # whether a part of the value was returned
        self._enter(_State.BETWEEN)

    def take_arguments(self) -> str:
        fresh = "".join(self._fresh)
        self._fresh = []
        return fresh

    def repair(self) -> None:
        self._fresh.append("}" if self._num_keys else "{}")
        self.is_complete = True

    def feed(self, char: str) -> None:
        assert not self.is_complete
        self._text += char
        found = self._markers.feed(char)
        if found is not None:
            self._text = self._text[: -len(found[1])]
            self._leave(found[1])
            return
        num_held = self._markers.num_held + 2 * len(self._style.trim)
        if len(self._text) > num_held:
            self._take(self._text[: len(self._text) - num_held])
            self._text = self._text[len(self._text) - num_held :]

    def _enter(self, state: _State) -> None:
        style = self._style
        markers = {
            _State.BETWEEN: (style.key_start, style.end),
            _State.KEY: (style.key_end,),
            _State.GAP: (style.value_start, style.end),
            _State.VALUE: (style.value_end,),
        }
        self._state = state
        self.is_in_text = state is _State.VALUE
        self._text = ""
        self._collected = []
        self._markers = StopMatcher([StopString(marker) for marker in markers[state]])

    def _leave(self, marker: str) -> None:
        """Continue behind a marker."""
        style = self._style
        if self._state is _State.VALUE:
            self._end_value()
            self._enter(_State.BETWEEN)
        elif marker == style.end and self._state is not _State.KEY:
            self.repair()
        elif self._state is _State.BETWEEN:
            self._enter(_State.KEY)
        elif self._state is _State.KEY:
            self._begin_value("".join((*self._collected, self._text)).strip())
            self._enter(_State.GAP if style.value_start else _State.VALUE)
        else:
            self._enter(_State.VALUE)

    def _begin_value(self, name: str) -> None:
        self._types = types_of(self._properties.get(name), self._schema)
        self._key = ("{" if self._num_keys == 0 else ", ") + json.dumps(name, ensure_ascii=False) + ": "
        self._num_keys += 1
        self._has_begun = False

    def _take(self, text: str) -> None:
        """Take text that is certainly no marker, nor beside one."""
        if self._state is _State.VALUE and self._types == {"string"}:
            if not self._has_begun:
                self._has_begun = True
                self._fresh.append(self._key + '"')
                text = text.removeprefix(self._style.trim)
            self._fresh.append(_escaped(text))
        elif self._state in (_State.KEY, _State.VALUE):
            self._collected.append(text)

    def _end_value(self) -> None:
        trim = self._style.trim
        text = "".join((*self._collected, self._text))
        if self._has_begun:
            self._fresh.append(_escaped(text.removesuffix(trim)) + '"')
        else:
            text = text.removeprefix(trim).removesuffix(trim)
            self._fresh.append(self._key + typed(text, self._types))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""Finds tool calls in an answer's text.

The text is read character by character, so the result does not depend on how it is split. Text that looks
like a call and has no tool's name is content. Whitespace around calls is not content.
"""

import enum
from collections.abc import Mapping
from typing import Any, Final

from server.parsers.argument_style import CallReader
from server.parsers.call_object import CallObject
from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.tool_format import ToolFormat
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"
_MAX_HEADER: Final = 1024  # characters between an opening and a call; more are no header


class _State(enum.Enum):
    START = enum.auto()  # only whitespace so far, in a format whose calls are the entire answer
    TEXT = enum.auto()
    HEADER = enum.auto()  # between an opening and an object
    OBJECT = enum.auto()
    AFTER = enum.auto()  # after an object: its end markers, or the header of the next one


class ToolCallParser:
    """The calls of one answer, in one format. `tools` are schemas of arguments by the tools' names."""

    def __init__(self, tool_format: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._format = tool_format
        self._tools = tools
        self._state = _State.TEXT if tool_format.opening else _State.START
        self._openings = _matcher(*tool_format.openings)
        self._closings = _matcher(tool_format.closing)
        self._held = ""  # of a call: it may begin its end marker
        self._raw: list[str] = []  # text not returned yet: content, or a part of a call
        self._object: CallReader = CallObject(None)
        self._has_started = False  # whether the call being read was returned as a `CallStart`
        self._space = ""  # whitespace that is content if content follows
        self._pieces: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Read more text and return the parts that are certain."""
        for char in text:
            self._read(char)
        return self._take()

    def end(self) -> list[Part]:
        """Return the remaining parts, when no text follows. An unfinished call is not completed."""
        if not self._has_started and self._state is not _State.AFTER:
            self._return_raw()
        if self._space and not self.num_calls:
            self._pieces.append(Content(self._space))
        return self._take()

    def _take(self) -> list[Part]:
        pieces = self._pieces
        self._pieces = []
        return merged(pieces)

    def _read(self, char: str) -> None:
        self._raw.append(char)
        match self._state:
            case _State.START:
                self._read_start(char)
            case _State.TEXT:
                self._read_text(char)
            case _State.OBJECT:
                self._read_object(char)
            case _:
                self._read_around(char)

    def _read_start(self, char: str) -> None:
        if char == "{" and self._format.style is None:
            self._begin_object(char)
        elif char in self._format.starts:
            self._state = _State.HEADER
        elif char not in _SPACE:
            self._become_text()

    def _read_text(self, char: str) -> None:
        if not self._format.opening:
            self._return_raw()
        elif (found := self._openings.feed(char)) is not None:
            opening = self._raw[-len(found[1]) :]
            del self._raw[-len(opening) :]
            self._return_raw()
            self._raw = opening
            self._state = _State.HEADER
        else:
            held = self._raw[len(self._raw) - self._openings.num_held :]
            del self._raw[len(self._raw) - len(held) :]
            self._return_raw()
            self._raw = held

    def _read_around(self, char: str) -> None:
        """Read markers up to the next call or the end of the calls."""
        is_header = self._state is _State.HEADER
        if self._may_begin(char):
            self._begin_object(char)
        elif self._format.closing and self._closings.feed(char) is not None:
            if is_header:
                self._return_raw()
            self._become_text()
        elif is_header and (len(self._raw) > _MAX_HEADER or not self._is_header(char)):
            self._become_text()
            self._return_raw()
        elif len(self._raw) > _MAX_HEADER:
            del self._raw[:-_MAX_HEADER]

    def _is_header(self, char: str) -> bool:
        """Return whether a header may go on with a character."""
        if self._format.opening:
            return True
        return char in _SPACE or (self._format.style is not None and (char.isalnum() or char in "_.-"))

    def _may_begin(self, char: str) -> bool:
        """Return whether a character is the first one of a call's object or arguments."""
        style = self._format.style
        if style is None:
            return char == "{"
        return char in style.begins and self._name_in("".join(self._raw[:-1])) is not None

    def _name_in(self, header: str) -> str | None:
        pattern = self._format.name_pattern
        found = pattern.search(header) if pattern is not None else None
        return found[1] if found else None

    def _begin_object(self, char: str) -> None:
        header = "".join(self._raw[:-1])
        if self._state is _State.AFTER:
            self._raw = [char] if self._format.name_pattern is None else self._raw
        self._state = _State.OBJECT
        self._has_started = False
        self._held = ""
        self._closings = _matcher(self._format.closing)
        style = self._format.style
        name = self._name_in(header)
        if style is not None:
            self._object = style.reader(self._tools.get(name or "", {}))
        else:
            self._object = CallObject(
                self._format.arguments_key if self._format.name_pattern is None else None
            )
        self._object.name = name
        self._feed_object(char)

    def _read_object(self, char: str) -> None:
        """Read a part of a call, up to its end or to the end marker of the calls."""
        call = self._object
        # A single character may also be the end of a list.
        if len(self._format.closing) < 2 or call.is_in_text:
            self._feed_object(char)
            return
        self._held += char
        if self._closings.feed(char) is None:
            num_held = self._closings.num_held
            certain = self._held[: len(self._held) - num_held]
            self._held = self._held[len(certain) :]
            for each in certain:
                if self._state is _State.OBJECT:
                    self._feed_object(each)
            return
        call.repair()
        self._return_call()
        if not self._has_started:
            self._return_raw()
        self._state = _State.AFTER if self._has_started else _State.TEXT
        self._has_started = False
        self._become_text()

    def _feed_object(self, char: str) -> None:
        self._object.feed(char)
        self._return_call()
        if self._object.is_complete:
            self._end_object()

    def _return_call(self) -> None:
        """Return what is new of a call, once its name is that of a tool."""
        call = self._object
        if not self._has_started and call.name is not None and call.name in self._tools:
            self._has_started = True
            self._space = ""
            self.num_calls += 1
            self._pieces.append(CallStart(call.name))
        if self._has_started and (arguments := call.take_arguments()):
            self._pieces.append(CallArguments(arguments))

    def _end_object(self) -> None:
        if self._has_started:
            self._raw = []
            self._state = _State.AFTER
            self._has_started = False
            self._closings = _matcher(self._format.closing)
        else:
            self._become_text()
            self._return_raw()

    def _become_text(self) -> None:
        """Continue with content. In a format whose calls are the entire answer, no call can follow."""
        if self._state is _State.AFTER:
            self._raw = []
        elif self._state is _State.START:
            self._return_raw()
        self._state = _State.TEXT
        self._openings = _matcher(*self._format.openings)
        self._closings = _matcher(self._format.closing)

    def _return_raw(self) -> None:
        text = self._space + "".join(self._raw)
        content = text.rstrip(_SPACE)
        if content:
            self._pieces.append(Content(content))
        self._space = text[len(content) :]
        self._raw = []


def merged(pieces: list[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind joined."""
    result: list[Part] = []
    for piece in pieces:
        match (result[-1] if result else None), piece:
            case (Content(before), Content(text)):
                result[-1] = Content(before + text)
            case (CallArguments(before), CallArguments(text)):
                result[-1] = CallArguments(before + text)
            case _:
                result.append(piece)
    return result


def _matcher(*markers: str) -> StopMatcher:
    return StopMatcher([StopString(marker) for marker in markers if marker])

"""Finds tool calls in an answer's text.

The text is read character by character, so the result does not depend on how it is split. Text that looks
like a call and has no tool's name is content. Whitespace around calls is not content.
"""

import enum
from collections.abc import Collection

from server.parsers.call_object import CallObject
from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.tool_format import ToolFormat
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"


class _State(enum.Enum):
    START = enum.auto()  # only whitespace so far, in a format whose calls are the entire answer
    TEXT = enum.auto()
    HEADER = enum.auto()  # between an opening and an object
    OBJECT = enum.auto()
    AFTER = enum.auto()  # after an object: its end markers, or the header of the next one


class ToolCallParser:
    """The calls of one answer, in one format, of tools with these names."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = names
        self._state = _State.TEXT if tool_format.opening else _State.START
        self._openings = _matcher(tool_format.opening)
        self._closings = _matcher(tool_format.closing)
        self._raw: list[str] = []  # text not returned yet: content, or a part of a call
        self._object = CallObject(None)
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
        if char == "{":
            self._begin_object(char)
        elif char in self._format.starts:
            self._state = _State.HEADER
        elif char not in _SPACE:
            self._become_text()

    def _read_text(self, char: str) -> None:
        if not self._format.opening:
            self._return_raw()
        elif self._openings.feed(char) is not None:
            opening = self._raw[-len(self._format.opening) :]
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
        """Read markers up to the next object or the end of the calls."""
        if char == "{":
            self._begin_object(char)
        elif self._format.closing and self._closings.feed(char) is not None:
            if self._state is _State.HEADER:
                self._return_raw()
            self._become_text()
        elif not self._format.opening and self._state is _State.HEADER and char not in _SPACE:
            self._become_text()
            self._return_raw()

    def _begin_object(self, char: str) -> None:
        header = "".join(self._raw[:-1])
        if self._state is _State.AFTER:
            self._raw = [char] if self._format.name_pattern is None else self._raw
        self._state = _State.OBJECT
        self._has_started = False
        self._closings = _matcher(self._format.closing)
        if self._format.name_pattern is None:
            self._object = CallObject(self._format.arguments_key)
        else:
            self._object = CallObject(None)
            if found := self._format.name_pattern.search(header):
                self._object.name = found[1]
        self._read_object(char)

    def _read_object(self, char: str) -> None:
        call = self._object
        call.feed(char)
        if not self._has_started and call.name is not None and call.name in self._names:
            self._has_started = True
            self._space = ""
            self.num_calls += 1
            self._pieces.append(CallStart(call.name))
        if self._has_started:
            self._return_arguments(call)
        if call.is_complete:
            self._end_object()

    def _return_arguments(self, call: CallObject) -> None:
        arguments = call.take_arguments()
        if call.is_complete and not call.has_arguments:
            arguments = "{}"
        if arguments:
            self._pieces.append(CallArguments(arguments))

    def _end_object(self) -> None:
        if self._has_started:
            self._raw = []
            self._state = _State.AFTER
            self._has_started = False
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
        self._openings = _matcher(self._format.opening)
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


def _matcher(marker: str) -> StopMatcher:
    return StopMatcher([StopString(marker)] if marker else [])

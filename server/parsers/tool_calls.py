"""Finds the calls of tools in an answer's text, character by character: how the text is cut on its way here makes no difference.

What looks like a call and turns out to be none (the object has no name, or not that of a tool) comes out as the content that it is. Space
around calls is no content.
"""

import enum
from collections.abc import Collection

from server.parsers.call_object import CallObject
from server.parsers.parts import CallArguments, CallStart, Content, Part
from server.parsers.tool_format import ToolFormat
from server.text.stop_strings import StopMatcher, StopString

_SPACE = " \t\r\n"


class _Place(enum.Enum):
    START = enum.auto()  # nothing but space so far, and a call would begin at once
    TEXT = enum.auto()
    HEADER = enum.auto()  # between an opening and an object
    OBJECT = enum.auto()
    AFTER = enum.auto()  # behind an object: its end marks, or the next one's header


class ToolCallParser:
    """The calls of one answer, in one format, of tools with these names."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._format, self._names = tool_format, names
        self._place = _Place.TEXT if tool_format.opening else _Place.START
        self._openings = _matcher(tool_format.opening)
        self._closings = _matcher(tool_format.closing)
        self._raw: list[str] = []  # text that is not told yet: it may be content, or a part of a call
        self._object = CallObject(None)
        self._is_told = False  # the call being read has begun for the client
        self._space = ""  # content if content follows
        self._pieces: list[Part] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Return what is now certain."""
        for char in text:
            self._read(char)
        return self._take()

    def end(self) -> list[Part]:
        """Return what is left: no text follows. A call that has begun stays as far as it came."""
        if not self._is_told and self._place is not _Place.AFTER:
            self._tell_raw()
        if self._space and not self.num_calls:
            self._pieces.append(Content(self._space))
        return self._take()

    def _take(self) -> list[Part]:
        pieces, self._pieces = self._pieces, []
        return merged(pieces)

    def _read(self, char: str) -> None:
        self._raw.append(char)
        match self._place:
            case _Place.START:
                self._read_start(char)
            case _Place.TEXT:
                self._read_text(char)
            case _Place.OBJECT:
                self._read_object(char)
            case _:
                self._read_around(char)

    def _read_start(self, char: str) -> None:
        if char == "{":
            self._begin_object(char)
        elif char in self._format.starts:
            self._place = _Place.HEADER
        elif char not in _SPACE:
            self._become_text()

    def _read_text(self, char: str) -> None:
        if not self._format.opening:
            self._tell_raw()
        elif self._openings.feed(char) is not None:
            opening = self._raw[-len(self._format.opening) :]
            del self._raw[-len(opening) :]
            self._tell_raw()
            self._raw, self._place = opening, _Place.HEADER
        else:
            held = self._raw[len(self._raw) - self._openings.num_held :]
            del self._raw[len(self._raw) - len(held) :]
            self._tell_raw()
            self._raw = held

    def _read_around(self, char: str) -> None:
        """Read marks until the next object begins, or until they are over."""
        if char == "{":
            self._begin_object(char)
        elif self._format.closing and self._closings.feed(char) is not None:
            if self._place is _Place.HEADER:
                self._tell_raw()
            self._become_text()
        elif not self._format.opening and self._place is _Place.HEADER and char not in _SPACE:
            self._become_text()
            self._tell_raw()

    def _begin_object(self, char: str) -> None:
        header = "".join(self._raw[:-1])
        if self._place is _Place.AFTER:
            self._raw = [char] if self._format.name_pattern is None else self._raw
        self._place, self._is_told, self._closings = _Place.OBJECT, False, _matcher(self._format.closing)
        self._object = CallObject(self._format.arguments_key if self._format.name_pattern is None else None)
        found = self._format.name_pattern.search(header) if self._format.name_pattern is not None else None
        if found is not None:
            self._object.name = found[1]
        self._read_object(char)

    def _read_object(self, char: str) -> None:
        call = self._object
        call.feed(char)
        if not self._is_told and call.name is not None and call.name in self._names:
            self._is_told, self._space = True, ""
            self.num_calls += 1
            self._pieces.append(CallStart(call.name))
        if self._is_told:
            self._tell_arguments(call)
        if call.is_complete:
            self._end_object()

    def _tell_arguments(self, call: CallObject) -> None:
        arguments = call.take_arguments()
        if call.is_complete and not call.has_arguments:
            arguments = "{}"
        if arguments:
            self._pieces.append(CallArguments(arguments))

    def _end_object(self) -> None:
        if self._is_told:
            self._raw, self._place, self._is_told = [], _Place.AFTER, False
        else:
            self._become_text()
            self._tell_raw()

    def _become_text(self) -> None:
        """Go on with content: for good where calls are all of an answer."""
        if self._place is _Place.AFTER:
            self._raw = []
        elif self._place is _Place.START:
            self._tell_raw()
        self._place = _Place.TEXT
        self._openings, self._closings = _matcher(self._format.opening), _matcher(self._format.closing)

    def _tell_raw(self) -> None:
        text = self._space + "".join(self._raw)
        content = text.rstrip(_SPACE)
        if content:
            self._pieces.append(Content(content))
        self._space, self._raw = text[len(content) :], []


def merged(pieces: list[Part]) -> list[Part]:
    """Return the pieces with neighbours of a kind made one."""
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

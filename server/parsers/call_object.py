"""Reads the JSON object of one tool call, character by character: its name, arguments and end.

It does not validate the JSON.
"""

import json

_SPACE = " \t\r\n"


class CallObject:
    """An incremental reader. `feed` it from the opening brace on, until `is_complete`.

    `arguments_key` None says that the object itself is the arguments. Some models write the arguments as JSON
    in a string; these are decoded.
    """

    def __init__(self, arguments_key: str | None) -> None:
        self.is_complete = False
        self.name: str | None = None
        self.has_arguments = arguments_key is None
        self._arguments_key = arguments_key
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None  # whose value is being read
        self._token: list[str] = []  # of the key or value being read
        self._fresh: list[str] = []  # arguments that were not taken yet

    def take_arguments(self) -> str:
        """Return the text of the arguments that was read since the last call."""
        fresh = "".join(self._fresh)
        self._fresh = []
        return fresh

    def feed(self, char: str) -> None:
        assert not self.is_complete
        is_structural = self._track(char)
        if self._arguments_key is None:
            self._fresh.append(char)
        elif is_structural and char == ":" and self._key is None:
            self._key = text_of("".join(self._token).strip(_SPACE + "{,")) or ""
            self._token = []
        elif is_structural and (char == "," or self.is_complete) and self._key is not None:
            self._end_value("".join(self._token).strip())
        else:
            self._token.append(char)
            if self._streams and not (char in _SPACE and is_structural):
                self._fresh.append(char)

    def _track(self, char: str) -> bool:
        """Track strings and nesting. Return whether the character is on the top level, outside of strings."""
        was_in_string = self._in_string
        was_top_level = self._depth == 1
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0
        is_top_level = (was_top_level and self._depth == 1) or self.is_complete
        return is_top_level and not was_in_string and not self._in_string

    @property
    def _streams(self) -> bool:
        """Whether the value being read is returned as it arrives: the arguments, unless they are a string."""
        return (
            self._key == self._arguments_key
            and next((char for char in self._token if char not in _SPACE), "") != '"'
        )

    def _end_value(self, text: str) -> None:
        if self._key == "name":
            self.name = text_of(text)
        if self._key == self._arguments_key:
            self.has_arguments = True
            if text.startswith('"'):
                self._fresh.append(text_of(text) or "")
        self._key = None
        self._token = []


def text_of(text: str) -> str | None:
    """Return the string that the JSON `text` is, or None if it is not a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None

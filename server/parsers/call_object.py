"""The JSON object of one call, read character by character: the name in it, its arguments as they come, its end. It trusts the JSON."""

import json

_SPACE = " \t\r\n"


class CallObject:
    """Feed it from the opening brace on, until `is_complete`.

    Without an `arguments_key` the object is the arguments itself. Arguments that are JSON within a string, as some models write them, are
    decoded.
    """

    def __init__(self, arguments_key: str | None) -> None:
        self.is_complete = False
        self.name: str | None = None
        self.has_arguments = arguments_key is None
        self._arguments_key = arguments_key
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None  # whose value is being read
        self._token: list[str] = []  # of the key or value being read
        self._fresh: list[str] = []  # arguments that nobody has taken

    def take_arguments(self) -> str:
        """Return the text of the arguments that has come since the last call."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, char: str) -> None:
        assert not self.is_complete
        is_border = self._track(char)
        if self._arguments_key is None:
            self._fresh.append(char)
        elif is_border and char == ":" and self._key is None:
            self._key, self._token = text_of("".join(self._token).strip(_SPACE + "{,")) or "", []
        elif is_border and (char == "," or self.is_complete) and self._key is not None:
            self._end_value("".join(self._token).strip())
        else:
            self._token.append(char)
            if self._streams and not (char in _SPACE and is_border):
                self._fresh.append(char)

    def _track(self, char: str) -> bool:
        """Follow strings and nesting; return whether the character stands on the object's own level, outside of strings."""
        was_in_string, was_own = self._in_string, self._depth == 1
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
        return (
            not was_in_string and not self._in_string and ((was_own and self._depth == 1) or self.is_complete)
        )

    @property
    def _streams(self) -> bool:
        """Whether what is read now goes out as it comes: arguments, unless they are a string."""
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
        self._key, self._token = None, []


def text_of(text: str) -> str | None:
    """Return the string that a piece of JSON is; None when it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None

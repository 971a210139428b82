"""Reads the JSON object of one tool call, character by character: its name, arguments and end.

It does not validate the JSON.
"""

import json

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class CallObject:
    """An incremental reader: an `ArgumentStyle`'s `CallReader`, from the opening brace on.

    `arguments_key` None says that the object itself is the arguments. Otherwise they are under that key or
    another usual one. Some models write the arguments as JSON in a string; these are decoded. Raw control
    characters in strings become escapes, and brackets are balanced. Missing or null arguments are `{}`.
    """

    def __init__(self, arguments_key: str | None) -> None:
        self.is_complete = False
        self.name: str | None = None
        self._has_arguments = arguments_key is None
        self._is_bare = arguments_key is None
        self._keys = {arguments_key, *_ARGUMENT_KEYS}
        self._closers: list[str] = []  # of the brackets that are open
        self.is_in_text = False
        self._is_escaped = False
        self._key: str | None = None  # whose value is being read
        self._token: list[str] = []  # of the key or value being read
        self._fresh: list[str] = []  # arguments that were not taken yet

    def take_arguments(self) -> str:
        fresh = "".join(self._fresh)
        self._fresh = []
        return fresh

    def feed(self, char: str) -> None:
        assert not self.is_complete
        if not self.is_in_text and char in "}]" and self._closers and char != self._closers[-1]:
            if char in self._closers:
                self.feed(self._closers[-1])  # it is missing
                self.feed(char)
            return
        is_structural = self._track(char)
        if self.is_in_text and char < " ":
            char = json.dumps(char)[1:-1]
        if self._is_bare:
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
        if not self._closers and not self._has_arguments:
            self._fresh.append("{}")

    def repair(self) -> None:
        while not self.is_complete:
            self.feed(self._closers[-1])

    def _track(self, char: str) -> bool:
        """Track strings and nesting. Return whether the character is on the top level, outside of strings."""
        was_in_text = self.is_in_text
        was_top_level = len(self._closers) == 1
        if self.is_in_text:
            self.is_in_text = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self.is_in_text = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            self._closers.pop()
            self.is_complete = not self._closers
        is_top_level = (was_top_level and len(self._closers) == 1) or self.is_complete
        return is_top_level and not was_in_text and not self.is_in_text

    @property
    def _streams(self) -> bool:
        """Whether the value being read is returned as it arrives: the arguments, unless they are a string or
        may be null.
        """
        return self._is_of_arguments and next(
            (char for char in self._token if char not in _SPACE), ""
        ) not in (
            '"',
            "n",
        )

    @property
    def _is_of_arguments(self) -> bool:
        return self._key in self._keys and not self._has_arguments

    def _end_value(self, text: str) -> None:
        if self._key == "name":
            self.name = text_of(text)
        if self._is_of_arguments and text != "null":
            self._has_arguments = True
            if text.startswith('"'):
                self._fresh.append(text_of(text) or "{}")
            elif text.startswith("n"):
                self._fresh.append(text)
        self._key = None
        self._token = []


def text_of(text: str) -> str | None:
    """Return the string that the JSON `text` is, or None if it is not a string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None

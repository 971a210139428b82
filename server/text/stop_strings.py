"""Finds stop strings character by character, so they may begin and end within tokens.

Each string is matched by the automaton of Knuth, Morris and Pratt (1977). Its state is the length of the
longest prefix of the string that the text ends with. Streaming needs the same number: that many characters at
the end must be held back, since they may begin a stop string. Each character costs amortised constant time. A
search of the held text for every token would be quadratic.
"""

from collections.abc import Sequence


class StopString:
    """One stop string and its failure function.

    `_borders[n]` is the length of the longest proper prefix of `text[:n]` that is also a suffix of it. After
    a mismatch with n characters matched, it is the number that still match. For "abab", the borders are 0, 0,
    0, 1, 2.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self._borders = [0, 0]
        for char in text[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def advance(self, num_matched: int, char: str) -> int:
        """Return the length of the longest prefix of this string that the text ends with, once `char`
        follows.
        """
        return self._extend(num_matched, char)

    def _extend(self, num_matched: int, char: str) -> int:
        while num_matched and self.text[num_matched] != char:
            num_matched = self._borders[num_matched]
        return num_matched + 1 if self.text[num_matched] == char else 0


class StopMatcher:
    """The state of several stop strings over one text."""

    def __init__(self, strings: Sequence[StopString]) -> None:
        self._strings = strings
        self._num_matched = [0] * len(strings)

    @property
    def num_held(self) -> int:
        """The number of characters at the text's end that may begin a stop string."""
        return max(self._num_matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read further text, up to the first complete stop string.

        Return the number of characters read and that string (of several that end there, the longest), or
        None.
        """
        if not self._strings:
            return None
        for num_read, char in enumerate(text, start=1):
            complete = []
            for index, string in enumerate(self._strings):
                num_matched = string.advance(self._num_matched[index], char)
                self._num_matched[index] = num_matched
                if num_matched == len(string.text):
                    complete.append(string.text)
            if complete:
                return num_read, max(complete, key=len)
        return None

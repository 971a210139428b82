"""Stop strings, looked for character by character: where they lie across tokens makes no difference.

Each string is matched by the automaton of Knuth, Morris and Pratt (1977), whose state is also the answer to the streaming question: how
many of the last characters may be the beginning of a stop string.
"""

from collections.abc import Sequence


class StopString:
    """One string and, for each of its prefixes, the longest proper prefix that is also its suffix."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        self.text = text
        self._borders = [0, 0]
        for char in text[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def advance(self, num_matched: int, char: str) -> int:
        """Return how many of this string's characters match the text's end once `char` follows."""
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
        """How many of the text's last characters may be the beginning of a stop string."""
        return max(self._num_matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read on; return the first stop string to be complete (of several the longest) and how many of these characters it took."""
        if not self._strings:
            return None
        for position, char in enumerate(text, 1):
            self._num_matched = [
                string.advance(n, char) for string, n in zip(self._strings, self._num_matched, strict=True)
            ]
            complete = [
                s.text for s, n in zip(self._strings, self._num_matched, strict=True) if n == len(s.text)
            ]
            if complete:
                return position, max(complete, key=len)
        return None

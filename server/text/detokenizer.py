"""One choice's tokens to text, as they come.

Nothing is given out that a later token could change: half a character waits for its other half, and whatever may be the beginning of a stop
string waits until it is not. What comes out in all is the same however the tokens are grouped, and it is what the tokenizer's own decoder
makes of the whole. There is one exception: where a SentencePiece vocabulary's byte tokens are not valid UTF-8, that decoder replaces all
the bytes of the run back to its start, which nobody who streams can; here only the invalid ones are replaced.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from server.text.stop_strings import StopMatcher, StopString
from server.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain, and how many more tokens have now given all of theirs."""

    text: str
    num_tokens: int


class Detokenizer:
    """Text of one choice. After a stop string (`stop_string` says which) no token may follow.

    Stop strings count from the answer's token number `min_tokens` on. `continues_text` says that the tokens go on with a text instead of
    beginning one. `kept_token_ids` are the special tokens that are not skipped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_strings: Sequence[StopString] = (),
        *,
        include_stop_string: bool = False,
        skip_special_tokens: bool = True,
        kept_token_ids: frozenset[int] = frozenset(),
        continues_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.stop_string: str | None = None
        self._vocabulary = vocabulary
        self._matcher = StopMatcher(stop_strings)
        self._include_stop_string = include_stop_string
        self._skipped = vocabulary.special_token_ids - kept_token_ids if skip_special_tokens else frozenset()
        self._has_begun = continues_text
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._has_ended = False
        self._num_decoded = 0  # characters
        self._num_emitted = 0
        self._token_ends: deque[int] = (
            deque()
        )  # for each token not yet released, the character that completes it

    def push(self, token_id: int) -> bool:
        """Take the next token and return whether a stop string is now complete."""
        assert not self._has_ended
        self.num_tokens += 1
        text = self._utf8.decode(self._bytes_of(token_id))
        self._held += text
        self._num_decoded += len(text)
        has_half_character = bool(self._utf8.getstate()[0])
        self._token_ends.append(self._num_decoded + has_half_character)
        if self.num_tokens >= self._min_tokens:
            self._look_for_stop(text)
        return self.stop_string is not None

    def pull(self) -> Piece:
        """Return the text that no later token can change."""
        num_held = 0 if self._has_ended else self._matcher.num_held
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        self._num_emitted += len(text)
        return Piece(text, self._release())

    def end(self) -> Piece:
        """Return what is left: no token follows. Half a character becomes U+FFFD."""
        if not self._has_ended:
            self._held += self._utf8.decode(b"", final=True)
            self._has_ended = True
        return self.pull()

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if self._has_begun:
            return self._vocabulary.token_bytes(token_id)
        self._has_begun = True
        return self._vocabulary.first_token_bytes(token_id)

    def _look_for_stop(self, text: str) -> None:
        """Cut the held text at the first stop string that `text`, its end, completes."""
        found = self._matcher.feed(text)
        if found is None:
            return
        num_read, self.stop_string = found
        end = len(self._held) - len(text) + num_read
        self._held = self._held[: end if self._include_stop_string else end - len(self.stop_string)]
        self._has_ended = True

    def _release(self) -> int:
        num_released = 0
        while self._token_ends and (self._has_ended or self._token_ends[0] <= self._num_emitted):
            self._token_ends.popleft()
            num_released += 1
        return num_released

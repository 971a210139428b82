"""Turns one choice's tokens into text as they arrive.

Text is emitted only when no later token can change it. Half a character waits for its other half, and a
possible start of a stop string waits until it is decided. The text in all is the same for every grouping of
the tokens, and equals the tokenizer's own decoding of all tokens. There is one exception. Where the byte
tokens of a SentencePiece vocabulary are not valid UTF-8, the tokenizer replaces all bytes of the run, back to
its start. A stream cannot take back what it has sent, so here only the invalid bytes are replaced.

`tokenizers.decoders.DecodeStream` does not serve: it reports no bytes for a token, which log-probabilities
need, and holds no stop strings.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from server.text.stop_regex import StopRegex
from server.text.stop_strings import StopMatcher, StopString
from server.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is final, and the number of tokens whose text has become complete with it."""

    text: str
    num_tokens: int


class Detokenizer:
    """The text of one choice. After a stop string, which `stop_string` holds, no token may follow.

    The text also ends behind the first match of one of `stop_regexes`. It keeps the match, as with SGLang,
    and `stop_string` is the expression. Both count from the answer's token `min_tokens` on (counted from 1).

    `continues_text` says that
    the tokens continue a text: some tokenizers drop a space at the start of one. `kept_token_ids` are the
    special tokens that are not skipped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_strings: Sequence[StopString] = (),
        stop_regexes: Sequence[StopRegex] = (),
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
        self._regexes = stop_regexes
        self._include_stop_string = include_stop_string
        self._skipped = vocabulary.special_token_ids - kept_token_ids if skip_special_tokens else frozenset()
        self._has_begun = continues_text
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded and not emitted
        self._has_ended = False
        self._num_decoded = 0  # characters
        self._num_emitted = 0  # characters
        # For each token not yet counted by a `Piece`, the number of characters that must be emitted first.
        self._token_ends: deque[int] = deque()

    def push(self, token_id: int) -> bool:
        """Consume the next token and return whether a stop string is now complete."""
        assert not self._has_ended
        self.num_tokens += 1
        text = self._utf8.decode(self._bytes_of(token_id))
        self._held += text
        self._num_decoded += len(text)
        # A token that ends within a character is complete only with that character, which a later token
        # finishes.
        ends_within_character = bool(self._utf8.getstate()[0])
        self._token_ends.append(self._num_decoded + ends_within_character)
        if self.num_tokens >= self._min_tokens:
            self._cut_at_stop(text)
        return self.stop_string is not None

    def pull(self) -> Piece:
        """Return the text that no later token can change."""
        num_held = 0 if self._has_ended else self._matcher.num_held
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        self._num_emitted += len(text)
        return Piece(text, self._count_complete_tokens())

    def end(self) -> Piece:
        """Return the rest of the text: no token follows. Half a character becomes U+FFFD."""
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

    def _cut_at_stop(self, text: str) -> None:
        """Cut the held text at the first stop string or match that is complete within `text`, its end."""
        ends = [(end, regex.pattern, 0) for regex in self._regexes if (end := regex.feed(text)) is not None]
        match = self._matcher.feed(text)
        if match is not None:
            num_read, stop_string = match
            num_cut = 0 if self._include_stop_string else len(stop_string)
            ends.insert(0, (num_read, stop_string, num_cut))
        if not ends:
            return
        num_read, self.stop_string, num_cut = min(ends, key=lambda end: end[0])
        self._held = self._held[: len(self._held) - len(text) + num_read - num_cut]
        self._has_ended = True

    def _count_complete_tokens(self) -> int:
        num_complete = 0
        while self._token_ends and (self._has_ended or self._token_ends[0] <= self._num_emitted):
            self._token_ends.popleft()
            num_complete += 1
        return num_complete

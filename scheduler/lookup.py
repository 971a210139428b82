"""Guesses of a sequence's next tokens, looked up in its own text and in the request's prediction.

Where the last tokens have occurred before, those that followed them may follow again: prompt lookup decoding.
A guess costs a little time when it is wrong. A sequence whose guesses are mostly wrong makes fewer of them.
"""

from array import array
from collections.abc import Sequence

# How many last tokens must have occurred before. The longer match is preferred, since it is less ambiguous.
_NGRAM_SIZES = (8, 3)

_TYPE = "I"
_WIDTH = array(_TYPE).itemsize  # bytes of a token

# A step with a draft takes some 10 to 20 % longer than one without, so that at least about every fourth must
# bring a token more.
_MIN_ACCEPTED = 0.3
_SMOOTHING = 0.2  # weight of the newest draft in the running average
_MAX_BETWEEN = 32  # occurrences of the bytes that begin between two tokens, after which a search ends
_PAUSE = 32  # tokens without a draft after drafts that did not pay


class Lookup:
    """The text of one sequence, to be searched. Tokens are 4 bytes each, so that `bytes.rfind` can search."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int]) -> None:
        self._prediction = bytearray(_packed(prediction))
        self._text = bytearray(_packed(prompt))
        self._num_outputs = 0
        self._num_accepted = 1.0  # running average of a draft's tokens that were drawn
        self._resume = 0  # the number of outputs from which on drafts are made again

    def draft(self, outputs: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that may follow `outputs`, all of the answer so far."""
        self._text += _packed(outputs[self._num_outputs :])
        self._num_outputs = len(outputs)
        if self._num_outputs < self._resume:
            return ()
        return self._predicted(outputs, max_tokens) or self._found(max_tokens)

    def observe(self, num_accepted: int) -> None:
        """Learn how many tokens of the last draft were drawn."""
        self._num_accepted += _SMOOTHING * (num_accepted - self._num_accepted)
        if self._num_accepted < _MIN_ACCEPTED:
            self._num_accepted = _MIN_ACCEPTED  # the next failure pauses again, the next success goes on
            self._resume = self._num_outputs + _PAUSE

    def _predicted(self, outputs: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return the draft at the prediction's start, before there are tokens enough to search for."""
        start = _packed(outputs)
        if len(outputs) >= _NGRAM_SIZES[-1] or not self._prediction.startswith(start):
            return ()
        return _unpacked(self._prediction[len(start) : len(start) + max_tokens * _WIDTH])

    def _found(self, max_tokens: int) -> tuple[int, ...]:
        length = len(self._text)
        for size in _NGRAM_SIZES:
            ngram = self._text[-size * _WIDTH :]
            if len(ngram) < size * _WIDTH:
                continue
            end = _last_end(self._prediction, ngram, len(self._prediction))
            if end is not None and end < len(self._prediction):
                return _unpacked(self._prediction[end : end + max_tokens * _WIDTH])
            end = _last_end(self._text, ngram, length - _WIDTH)
            if end is not None:
                draft = list(_unpacked(self._text[end : end + max_tokens * _WIDTH]))
                period = (length - end) // _WIDTH
                while len(draft) < max_tokens:  # a short period goes on
                    draft.append(draft[-period])
                return tuple(draft)
        return ()


def _last_end(text: bytearray, ngram: bytearray, limit: int) -> int | None:
    """Return where the last occurrence of some tokens within the first `limit` bytes ends; None: nowhere."""
    position = text.rfind(ngram, 0, limit)
    for _ in range(_MAX_BETWEEN):
        if position < 0 or position % _WIDTH == 0:
            break
        position = text.rfind(ngram, 0, position + len(ngram) - 1)
    return None if position < 0 or position % _WIDTH else position + len(ngram)


def _packed(token_ids: Sequence[int]) -> bytes:
    return array(_TYPE, token_ids).tobytes()


def _unpacked(text: bytearray) -> tuple[int, ...]:
    return tuple(array(_TYPE, bytes(text)))

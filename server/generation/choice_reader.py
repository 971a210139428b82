"""Reads one choice of an answer: the parts of its text, and the number of its reasoning tokens."""

from server.generation.events import ChoiceDelta
from server.parsers.answer_reader import AnswerReader
from server.parsers.parts import Part
from server.text.logprobs import TokenLogprob
from server.text.vocabulary import Vocabulary


class ChoiceReader:
    """`content_logprobs` are those of the last delta, without those of reasoning tokens."""

    def __init__(self, reader: AnswerReader, vocabulary: Vocabulary) -> None:
        self._reader = reader
        self._vocabulary = vocabulary
        self.num_reasoning_tokens = 0
        self.content_logprobs: tuple[TokenLogprob, ...] = ()
        self._is_counting = not reader.is_past_reasoning
        self._num_chars = 0  # of the answer's text before `_uncounted`
        self._uncounted: list[ChoiceDelta] = []  # deltas that are not known to be reasoning or content

    def read(self, delta: ChoiceDelta) -> list[Part]:
        """Read the next delta and return the parts that are certain."""
        pieces = self._reader.feed(delta.text)
        if delta.final is not None:
            pieces += self._reader.end()
        num_before = self.num_reasoning_tokens
        if self._is_counting:
            self._count(delta)
        self.content_logprobs = delta.logprobs[self.num_reasoning_tokens - num_before :]
        return pieces

    def _count(self, delta: ChoiceDelta) -> None:
        self._uncounted.append(delta)
        self._is_counting = not self._reader.is_past_reasoning
        num_chars = self._reader.num_reasoning_chars
        while self._uncounted and num_chars > 0:
            first = self._uncounted[0]
            if self._num_chars + len(first.text) > num_chars:
                self.num_reasoning_tokens += self._num_tokens_of(first, num_chars - self._num_chars)
                break
            self.num_reasoning_tokens += len(first.token_ids)
            self._num_chars += len(self._uncounted.pop(0).text)
            if not self._is_counting and self._num_chars == num_chars:
                break
        if not self._is_counting:
            self._uncounted.clear()

    def _num_tokens_of(self, delta: ChoiceDelta, num_chars: int) -> int:
        """Return the number of the delta's tokens that begin in its first `num_chars` characters."""
        num_seen = 0
        for index, token_id in enumerate(delta.token_ids):
            if num_seen >= num_chars:
                return index
            num_seen += len(self._vocabulary.token_text(token_id))
        return len(delta.token_ids)

"""Which parts of a prompt's texts are kept, by the importance of its chunks. No tokenizer, no tensors.

(Cross-family speculative prefill, arXiv 2603.02631: a draft scores chunks of its own tokens, and the text of
the best ones is what the other model reads.) Kept text is widened to whole sentences, lines or records, which
lost the fewest answers in a trial. A mark stands for what is left out.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

Span: TypeAlias = tuple[int, int]  # of characters, the end is exclusive

MARK: Final = "[...]"
SEPARATOR: Final = "\n\n"  # between the passages that a draft reads
# The ends of lines, of sentences and of records in a line of JSON.
_END = re.compile(r"\n+|[.!?][\"'”’)\]]*[ \t]+|[。！？]+|\},\s*")
_MAX_WIDENING = 240  # characters, on each side; a text without ends is cut between words
_MAX_WORD = 40
_MIN_GAP = 32  # characters; the mark and a shorter gap cost about as many tokens


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of a prompt: a message's, or all of a raw prompt. `is_question` is the last one by the user."""

    text: str
    may_be_cut: bool
    is_question: bool = False


def joined(passages: Sequence[Passage]) -> str:
    """Return the text that a draft reads."""
    return SEPARATOR.join(passage.text for passage in passages)


@dataclass(frozen=True)
class Shortening:
    """The passages of a prompt and the scores of its chunks.

    `chunks` are spans of `joined(passages)` in order, with their `scores`. `protected` spans are kept, and so
    are passages that may not be cut.
    """

    passages: Sequence[Passage]
    chunks: Sequence[Span]
    scores: Sequence[float]
    protected: Sequence[Span] = ()

    @cached_property
    def _starts(self) -> list[int]:
        """Where each passage begins in the joined text."""
        starts = [0]
        for passage in self.passages:
            starts.append(starts[-1] + len(passage.text) + len(SEPARATOR))
        return starts[:-1]

    @cached_property
    def _ranked(self) -> list[int]:
        """The indices of the chunks that may be cut: those with a protected part, then the best.

        Ties go to the earlier chunk.
        """
        cuttable = [
            (start, start + len(passage.text))
            for start, passage in zip(self._starts, self.passages, strict=True)
            if passage.may_be_cut
        ]
        indices = [index for index, chunk in enumerate(self.chunks) if _overlaps(chunk, cuttable)]
        return sorted(
            indices,
            key=lambda index: (not _overlaps(self.chunks[index], self.protected), -self.scores[index], index),
        )

    @property
    def num_chunks(self) -> int:
        """How many chunks may be cut."""
        return len(self._ranked)

    def texts(self, num_kept: int) -> list[str]:
        """Return the texts of the passages with the first `num_kept` chunks of those that may be cut."""
        kept = sorted([*self.protected, *(self.chunks[index] for index in self._ranked[:num_kept])])
        texts = []
        for start, passage in zip(self._starts, self.passages, strict=True):
            end = start + len(passage.text)
            own = [(max(a, start) - start, min(b, end) - start) for a, b in kept if a < end and b > start]
            texts.append(shortened(passage.text, own) if passage.may_be_cut else passage.text)
        return texts


def _overlaps(span: Span, others: Iterable[Span]) -> bool:
    return any(span[0] < end and span[1] > start for start, end in others)


def shortened(text: str, kept: Iterable[Span]) -> str:
    """Return a text with a mark in place of all but the `kept` spans, widened to whole sentences."""
    ends = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    pieces = []
    end = 0
    for first, last in merged((_widened(text, span, ends) for span in kept), len(text)):
        pieces += [_mark(text[end:first], text[:end]), text[first:last]]
        end = last
    return "".join([*pieces, _mark(text[end:], text[:end])])


def merged(spans: Iterable[Span], length: int) -> list[Span]:
    """Return the spans in order, with those joined that overlap or have a short gap between them.

    A short gap at the start or the end of a text of `length` characters is closed too.
    """
    found: list[Span] = []
    for first, last in sorted(spans):
        before = found[-1][1] if found else 0
        if first - before >= _MIN_GAP:
            found.append((first, last))
        else:
            start = found.pop()[0] if found else 0
            found.append((start, max(last, before)))
    if found and length - found[-1][1] < _MIN_GAP:
        found[-1] = (found[-1][0], length)
    return found if found or length >= _MIN_GAP else [(0, length)]


def _mark(gap: str, before: str) -> str:
    """Return the mark for a gap, with the white space that separates it from its neighbours."""
    if not gap:
        return ""
    lead = "" if not before or before[-1].isspace() else " "
    return lead + MARK + (gap[len(gap.rstrip()) :] or " ")


def _widened(text: str, span: Span, ends: Sequence[int]) -> Span:
    """Return the span of the whole sentences that a span is part of.

    `ends` are those of all sentences, with 0 first. Where they are far away, words stay whole.
    """
    first, last = span
    start = ends[bisect_right(ends, first) - 1]
    end = ends[bisect_left(ends, last)]
    if first - start > _MAX_WIDENING:
        word = re.search(r"\S*\Z", text[max(first - _MAX_WORD, 0) : first])
        start = first - (len(word[0]) if word is not None and len(word[0]) < _MAX_WORD else 0)
    if end - last > _MAX_WIDENING:
        word = re.match(r"\S*", text[last : last + _MAX_WORD])
        end = last + (len(word[0]) if word is not None and len(word[0]) < _MAX_WORD else 0)
    return start, end


def chunk_spans(
    offsets: Sequence[Span], num_before: int, num_tokens: int, chunk_tokens: int, length: int
) -> list[Span]:
    """Return the span of each chunk of a draft's prompt in the text of `length` characters that it reads.

    `offsets` are those of the text's tokens, of which the first is token `num_before` of the prompt's
    `num_tokens`. The spans cover the text without gaps; chunks without a token of it have an empty one.
    """

    def border(token: int) -> int:
        index = token - num_before
        if index <= 0:
            return 0
        return offsets[index][0] if index < len(offsets) else length

    firsts = range(0, num_tokens, chunk_tokens)
    return [(border(first), border(min(first + chunk_tokens, num_tokens))) for first in firsts]

"""Which tokens of a prompt are read again behind it, so that a question before a long text is found."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from server.text.vocabulary import Vocabulary

_PARAGRAPH_END = re.compile(rb"\S[ \t\r]*\n[ \t\r]*\n")
_QUESTION_MARK = re.compile("[?\uff1f\u061f\u037e]")  # also the full-width, the Arabic and the Greek one
# One that ends a sentence, in UTF-8: not that of a URL or of code. No space follows full-width marks.
_SENTENCE_END = re.compile(
    rb"(?<![ \t])(?P<mark>\?)(?:[\"')\]*_]|\xe2\x80[\x99\x9d]|\xc2\xbb)*(?:\s|<|$)"
    rb"|(?P<wide>\xef\xbc\x9f|\xd8\x9f|\xcd\xbe)"
)
# Instructions that follow a question are seldom longer, and text before it may ask something else.
_TAIL = 256  # tokens
# A paragraph that asks nothing is most often an introduction. Its votes would keep what resembles it, in the
# place of what a question at the prompt's end points at.
_WEIGHT_OF_OTHERS = 0.25


@dataclass(frozen=True, slots=True)
class Paragraph:
    """The tokens, and what their votes on the tokens to keep count, of 1."""

    token_ids: tuple[int, ...]
    weight: float


def asks(text: str) -> bool:
    """Return whether a text has a question mark."""
    return _QUESTION_MARK.search(text) is not None


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens of the text that asks, as a chat's last user message: its beginning, and its end."""

    beginning: tuple[int, ...]
    end: tuple[int, ...]


def echoed(question: Question, vocabulary: Vocabulary, max_tokens: int) -> Paragraph:
    """Return the first paragraph of a question's text.

    If it asks nothing, and the text ends with a line that does, or with instructions behind one, return that
    line.
    """
    first = first_paragraph(question.beginning, vocabulary, max_tokens)
    if first.weight == 1.0 or max_tokens == 0:
        return first
    return _last_question(question.end[-_TAIL:], vocabulary, max_tokens) or first


def _last_question(token_ids: Sequence[int], vocabulary: Vocabulary, max_tokens: int) -> Paragraph | None:
    """Return the last line that asks, up to its question mark."""
    if not all(0 <= token_id < len(vocabulary) for token_id in token_ids):
        return None  # refused later
    pieces = [vocabulary.token_bytes(token_id) for token_id in token_ids]
    text = b"".join(pieces)
    marks = [match.end(match.lastgroup or 0) - 1 for match in _SENTENCE_END.finditer(text)]  # last bytes
    if not marks:
        return None
    ends = list(itertools.accumulate(map(len, pieces)))
    first = bisect_right(ends, text.rfind(b"\n", 0, marks[-1]) + 1)
    end = bisect_right(ends, marks[-1]) + 1
    return Paragraph(tuple(token_ids[max(first, end - max_tokens) : end]), 1.0)


def first_paragraph(token_ids: Sequence[int], vocabulary: Vocabulary, max_tokens: int) -> Paragraph:
    """Return the tokens up to the first blank line after a text, or the first `max_tokens`.

    What follows the blank line is the text that the question is about. Its votes would keep the text's
    beginning, which resembles itself most.
    """
    read = b""  # bytes, since a character may be cut into several tokens
    end = 0
    for token_id in token_ids[:max_tokens]:
        if not 0 <= token_id < len(vocabulary):
            break  # refused later; unknown ids would fill the vocabulary's memory
        piece = vocabulary.token_bytes(token_id)
        read += piece
        end += 1
        if b"\n" in piece and _PARAGRAPH_END.search(read):
            break
    weight = 1.0 if asks(read.decode(errors="replace")) else _WEIGHT_OF_OTHERS
    return Paragraph(tuple(token_ids[:end]), weight)

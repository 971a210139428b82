"""Which tokens of a prompt are read again behind it, so that a question before a long text is found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from server.text.vocabulary import Vocabulary

_PARAGRAPH_END = re.compile(rb"\S[ \t\r]*\n[ \t\r]*\n")
_QUESTION_MARK = re.compile("[?\uff1f\u061f\u037e]")  # also the full-width, the Arabic and the Greek one
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

"""Which tokens of a prompt are read again behind it, so that a question before a long text is found."""

import re
from collections.abc import Sequence

from server.text.vocabulary import Vocabulary

_PARAGRAPH_END = re.compile(r"\S[ \t\r]*\n[ \t\r]*\n")


def first_paragraph(token_ids: Sequence[int], vocabulary: Vocabulary, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens up to the first blank line after a text, or the first `max_tokens`.

    What follows the blank line is the text that the question is about. Its votes would keep the text's
    beginning, which resembles itself most.
    """
    text = ""
    max_tokens = max_tokens if all(0 <= token_id < len(vocabulary) for token_id in token_ids) else 0
    for index, token_id in enumerate(token_ids[:max_tokens]):
        piece = vocabulary.token_text(token_id)
        text += piece
        if "\n" in piece and _PARAGRAPH_END.search(text):
            return tuple(token_ids[: index + 1])
    return tuple(token_ids[:max_tokens])

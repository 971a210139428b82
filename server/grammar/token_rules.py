"""Rules about single tokens: the only ones that an answer may have, and words that it may not.

As in vLLM, an answer with `allowed_token_ids` ends early only if its stop token is among them. A bad word is
excluded by its last token, in the spellings with and without a space before it.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.constraints import Allowed

_KEY: Final = "token_rules"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What a request says about tokens. Empty allows all."""

    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


def rules_text(choice: TokenChoice, bad_words: Sequence[Sequence[int]], num_tokens: int) -> str:
    """Return the rules as text. `bad_words` are token ids; the vocabulary has `num_tokens`."""
    return json.dumps({_KEY: [num_tokens, choice.allowed_token_ids, [list(word) for word in bad_words]]})


class TokenRules:
    """The state of one answer under the rules: a `scheduler.constraints.Matcher`."""

    def __init__(self, mask: bytes, bad_words: Sequence[tuple[int, ...]], *, may_end: bool) -> None:
        self._mask = mask
        self._bad_words = bad_words
        self._may_end = may_end
        self._last: deque[int] = deque(maxlen=max((len(word) - 1 for word in bad_words), default=0))

    @classmethod
    def parse(cls, text: str) -> "TokenRules | None":
        """Return the rules of a text, or None if it is a grammar."""
        if not text.startswith(f'{{"{_KEY}"'):
            return None
        num_tokens, allowed, bad_words = json.loads(text)[_KEY]
        if not allowed:
            return cls(b"\xff" * (-(-num_tokens // 8)), [tuple(word) for word in bad_words], may_end=True)
        mask = bytearray(-(-num_tokens // 8))
        for token_id in allowed:
            mask[token_id // 8] |= 1 << token_id % 8
        return cls(bytes(mask), [tuple(word) for word in bad_words], may_end=False)

    def copy(self) -> "TokenRules":
        return TokenRules(self._mask, self._bad_words, may_end=self._may_end)

    def allowed(self) -> Allowed:
        last = tuple(self._last)
        banned = {
            word[-1] for word in self._bad_words if len(word) == 1 or last[1 - len(word) :] == word[:-1]
        }
        mask = bytearray(self._mask)
        for token_id in banned:
            mask[token_id // 8] &= ~(1 << token_id % 8)
        return Allowed(bytes(mask) if any(mask) else self._mask, self._may_end)

    def advance(self, token_id: int) -> None:
        self._last.append(token_id)

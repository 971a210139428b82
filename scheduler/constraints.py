"""Grammars as the scheduler sees them: which token ids may follow, and whether the answer may end.

It knows no grammar and no text. The engine's owner supplies the matchers, which run on the engine's thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ConstraintError(Exception):
    """A grammar is invalid, or the answer cannot follow it any further. The message is fit for a client."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may follow: token t may if bit t % 8 of byte t // 8 of `mask` is set.

    `may_end` says whether the text so far is complete. Stop tokens are not in the mask, because they belong
    to the request. The next `num_free` tokens may be any: they need no mask, and a launch may draw several.
    """

    mask: bytes
    may_end: bool
    num_free: int = 0

    @property
    def must_end(self) -> bool:
        """Whether no token may follow."""
        return self.mask.count(0) == len(self.mask)

    def token_mask(self, stop_token_ids: Iterable[int], banned_token_ids: Iterable[int]) -> bytes:
        """Return the mask of a draw.

        `stop_token_ids` are added where the text may end. `banned_token_ids` are removed unless nothing else
        may follow: a mask without any token would leave nothing to draw.
        """
        mask = bytearray(self.mask)
        for token_id in banned_token_ids:
            if token_id < 8 * len(mask):
                mask[token_id // 8] &= ~(1 << token_id % 8)
        if not any(mask):
            mask = bytearray(self.mask)
        if self.may_end:
            for token_id in stop_token_ids:
                mask.extend(bytes(max(0, token_id // 8 + 1 - len(mask))))
                mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


class Matcher(Protocol):
    """The position of one sequence in its grammar. Used by one thread."""

    def allowed(self) -> Allowed:
        """Return the tokens that may follow. Raises `ConstraintError`."""
        ...

    def advance(self, token_id: int) -> None:
        """Consume the next token, which must be an allowed one. Raises `ConstraintError`."""
        ...


class Constraints(Protocol):
    """Makes matchers from `Add.grammar`."""

    def matchers(self, grammar: str, num_matchers: int) -> Sequence[Matcher]:
        """Return matchers at the grammar's start. Raises `ConstraintError`."""
        ...

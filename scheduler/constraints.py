"""What a grammar lets a sequence say next, as the scheduler sees it: a mask over token ids, and whether the answer may end.

It knows no grammar and no text: matchers come from whoever composes the engine, and work on the engine's thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ConstraintError(Exception):
    """A grammar cannot be followed (any further); the message is fit for a client."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow: bit t % 8 of byte t // 8 of `mask` says whether token t may, `may_end` whether the text so far is complete.

    Tokens that end an answer are not in the mask: which ones do is the request's affair.
    """

    mask: bytes
    may_end: bool

    @property
    def must_end(self) -> bool:
        """Whether no token may follow."""
        return self.mask.count(0) == len(self.mask)

    def token_mask(self, stop_token_ids: Iterable[int], banned_token_ids: Iterable[int]) -> bytes:
        """Return the mask of a draw: `stop_token_ids` may be drawn where the text may end, `banned_token_ids` where anything else may."""
        left = bytearray(self.mask)
        for token_id in banned_token_ids:
            if token_id < 8 * len(left):
                left[token_id // 8] &= ~(1 << token_id % 8)
        if not any(left):
            left = bytearray(self.mask)
        for token_id in stop_token_ids if self.may_end else ():
            left.extend(bytes(max(0, token_id // 8 + 1 - len(left))))
            left[token_id // 8] |= 1 << token_id % 8
        return bytes(left)


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Used by one thread."""

    def allowed(self) -> Allowed:
        """Return what may follow. Raises `ConstraintError`."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the next token, one that was allowed. Raises `ConstraintError`."""
        ...


class Constraints(Protocol):
    """Knows how to read `Add.grammar`."""

    def matchers(self, grammar: str, number: int) -> Sequence[Matcher]:
        """Return so many matchers at the grammar's start. Raises `ConstraintError`."""
        ...

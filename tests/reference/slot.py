"""One KV head's slot: sinks, a ring with a cursor, and the kept tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.reference.recipe import Recipe
from tests.reference.rounding import in_4_bits

_FEWEST_OF_A_MEAN = 16


@dataclass(frozen=True)
class Token:
    """A token of the sequence as attention sees it."""

    index: int
    key: Tensor  # [width], with the rotary position it was written with
    value: Tensor


class Slot:
    """The tokens held of a sequence after its prompt, and then as it grows."""

    def __init__(
        self, recipe: Recipe, prompt: list[Token], kept: list[int], lent: Sequence[int] = ()
    ) -> None:
        self._recipe = recipe
        self.kept = [prompt[index] for index in kept]
        self.sinks: list[Token] = []
        self.stored: list[Token] = []
        ring_size = recipe.num_recent + (recipe.num_kept - len(kept) if recipe.lend_kept else 0)
        self.ring: list[Token | None] = [None] * ring_size
        self._cursor = 0
        keys = [token.key for token in prompt[recipe.num_sink :]]
        self._centre = torch.stack(keys).mean(0) if len(keys) >= _FEWEST_OF_A_MEAN else 0.0
        for token in prompt:
            self.append(token)
        window_start = len(prompt) - recipe.prompt_window
        self.lent = [prompt[index] for index in lent]
        borrowers = {window_start + offset: token for offset, token in enumerate(self.lent)}
        self.ring = [
            None if token is None or token.index < window_start else borrowers.get(token.index, token)
            for token in self.ring
        ]

    def append(self, token: Token) -> None:
        """Hold the sequence's next token; once the ring is full, it overwrites the oldest there."""
        if len(self.sinks) < self._recipe.num_sink:
            self.sinks.append(token)
            return
        oldest = self.ring[self._cursor]
        if oldest is not None and self._recipe.num_attended is not None:
            key = in_4_bits(oldest.key - self._centre) + self._centre
            self.stored.append(replace(oldest, key=key, value=in_4_bits(oldest.value)))
        self.ring[self._cursor] = token
        self._cursor = (self._cursor + 1) % len(self.ring)

    def entries(self) -> list[Token | None]:
        """Return the slot entry by entry; the kept tokens are its last ones, in the order of the sequence."""
        sinks = self.sinks + [None] * (self._recipe.num_sink - len(self.sinks))
        unused = self._recipe.capacity - len(sinks) - len(self.ring) - len(self.kept)
        return [*sinks, *self.ring, *[None] * unused, *self.kept]

    def held(self) -> list[Token]:
        return [token for token in self.entries() if token is not None]

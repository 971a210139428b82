"""The arithmetic of a scratch, in integers: where a prompt that is longer than its slot is read, and when it must give something up.

A scratch of at least the prompt's length holds every token at the entry of its index. One that is smaller is read in rounds: each time it
is full, `num_dropped` of its entries are given up and the others close up, in the order of the sequence; the first time only as many as
make the scratch full again at the prompt's end. So rounds depend on nothing but the prompt's length. There are no tensors here, and it is
not known which entries are given up.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """`num_dropped` 0 says that no longer prompt is read. `num_ahead` of a prompt's last tokens are read ahead to choose what stays."""

    max_tokens: int
    num_dropped: int = 0
    num_ahead: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_ahead <= self.num_dropped < self.max_tokens:
            raise ValueError(
                f"a scratch needs num_ahead ≤ num_dropped < max_tokens, got {self.num_ahead}, {self.num_dropped} and {self.max_tokens}"
            )

    @property
    def num_entries(self) -> int:
        """Entries of a scratch, with those of the tokens read ahead."""
        return self.max_tokens + self.num_ahead

    def admits(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt of this length can be read."""
        return num_prompt_tokens <= self.max_tokens or self.num_dropped > 0

    def num_held(self, num_prompt_tokens: int) -> int:
        """Return how many tokens are held at the prompt's end, and before each time that something is given up.

        All that there is room for, less what is needed for the tokens read ahead not to be among those read before.
        """
        if num_prompt_tokens <= self.max_tokens:
            return num_prompt_tokens
        return min(self.max_tokens, num_prompt_tokens - self.num_ahead)

    def num_given_up(self, index: int, num_prompt_tokens: int) -> int:
        """Return how many tokens were given up before the one at `index` is read: so many entries before its index it is written."""
        num_held = self.num_held(num_prompt_tokens)
        if index < num_held:
            return 0
        num_rounds_left = (num_prompt_tokens - 1 - index) // self.num_dropped
        return num_prompt_tokens - num_held - num_rounds_left * self.num_dropped

    def round_end(self, index: int, num_prompt_tokens: int) -> int:
        """Return the index before which a chunk that begins at `index` must end."""
        return self.num_held(num_prompt_tokens) + self.num_given_up(index, num_prompt_tokens)

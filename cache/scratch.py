"""The arithmetic of a scratch, in integers: where a long prompt is read, and when entries are evicted.

A scratch of at least the prompt's length holds every token at the entry of its index. A smaller one is filled
in rounds. Each time it is full, `eviction_size` entries are evicted and the others close up, in the order of
the sequence. The first eviction is smaller, so that the scratch is full again at the prompt's end. The rounds
therefore depend on nothing but the prompt's length. There are no tensors here, and which entries are evicted
is not known.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """A scratch of `max_tokens` entries; `eviction_size` are evicted at a time. 0: no longer prompt is read.

    `num_ahead` of the prompt's last tokens are read ahead of each eviction: their attention selects the
    entries to evict. Up to `num_echoed` tokens of the question are read before them, and at the prompt's end.
    """

    max_tokens: int
    eviction_size: int = 0
    num_ahead: int = 0
    num_echoed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_ahead <= self.eviction_size < self.max_tokens:
            raise ValueError(
                "a scratch needs 0 ≤ num_ahead ≤ eviction_size < max_tokens, "
                f"got {self.num_ahead}, {self.eviction_size} and {self.max_tokens}"
            )

    @property
    def num_entries(self) -> int:
        """Entries of a scratch, with those of the tokens read ahead and read again."""
        return self.max_tokens + self.num_ahead + self.num_echoed

    def admits(self, num_prompt_tokens: int) -> bool:
        """Return whether a prompt of this length can be read."""
        return num_prompt_tokens <= self.max_tokens or self.eviction_size > 0

    def num_held(self, num_prompt_tokens: int) -> int:
        """Return how many tokens are held at the prompt's end, and before each eviction.

        These are as many as the scratch has room for. There are fewer for a prompt that is little longer: the
        tokens read ahead must not be among the tokens read before.
        """
        if num_prompt_tokens <= self.max_tokens:
            return num_prompt_tokens
        return min(self.max_tokens, num_prompt_tokens - self.num_ahead)

    def num_evicted(self, index: int, num_prompt_tokens: int) -> int:
        """Return how many tokens were evicted before a token is written, to the entry that much earlier."""
        num_held = self.num_held(num_prompt_tokens)
        if index < num_held:
            return 0
        # Counted from the prompt's end, where every round has its full size: the prompt's last token goes to
        # entry num_held − 1, and each round that is still to come before it evicts `eviction_size` entries.
        num_rounds_left = (num_prompt_tokens - 1 - index) // self.eviction_size
        return num_prompt_tokens - num_held - num_rounds_left * self.eviction_size

    def round_end(self, index: int, num_prompt_tokens: int) -> int:
        """Return where a chunk that begins at `index` must end: there the scratch is full."""
        return self.num_held(num_prompt_tokens) + self.num_evicted(index, num_prompt_tokens)

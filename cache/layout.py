"""The arithmetic of one slot, in integers: where a token is written, which entries are live, what is lost.

A slot is `[ sink: S | recent ring: R | kept: K ]`, of fixed size for every length of its sequence
(SnapStream, arXiv 2511.03092, section 3.1). Tokens are counted by their index in the sequence; this module
knows no rotary positions. The formula for a ring entry is the one that reproduces the paper's worked example
(figure 4): equation 4 as printed would write into the kept section.

There are no tensors here. `cache.slots` has the same arithmetic over tensors, and a property test holds the
two equal.
"""

from dataclasses import dataclass

STORE_BITS = 4  # of a value in the store behind a ring
_STEP_BYTES = 2
_LARGEST_PART = 64
_SMALLEST_PART = 32


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Sizes of a slot's three sections, in entries."""

    num_sink: int
    num_recent: int
    num_kept: int

    def __post_init__(self) -> None:
        if self.num_sink < 0 or self.num_kept < 0 or self.num_recent < 1:
            raise ValueError(
                "a slot needs num_sink ≥ 0, num_recent ≥ 1 and num_kept ≥ 0, "
                f"got {self.num_sink}, {self.num_recent} and {self.num_kept}"
            )

    @property
    def capacity(self) -> int:
        """Entries of a slot."""
        return self.num_sink + self.num_recent + self.num_kept

    def window_start(self, num_prompt_tokens: int, prompt_window: int) -> int:
        """Return s, the index of the first prompt token that enters the ring.

        The tokens between the sinks and s are the candidates for the kept entries.
        """
        return max(self.num_sink, num_prompt_tokens - prompt_window)

    def num_kept_used(self, window_start: int) -> int:
        """Return how many kept entries a sequence with this window start uses."""
        return min(window_start - self.num_sink, self.num_kept)

    def place(
        self, num_prompt_tokens: int, prompt_window: int, *, lend_kept: bool = False, num_lent: int = 0
    ) -> "SlotPlacement":
        """Return a prompt's placement. `num_lent` counts only for one that does not fit the slot."""
        start = self.window_start(num_prompt_tokens, prompt_window)
        used = self.num_kept_used(start)
        ring_size = self.capacity - self.num_sink - used if lend_kept else self.num_recent
        fits = start - self.num_sink <= used
        return SlotPlacement(self, start, ring_size, 0 if fits else num_lent)


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The store behind a slot's ring: it holds every token that has left the ring, in 4 bits a value.

    A decode step attends to `num_attended` of its `num_tokens` tokens.
    """

    num_tokens: int
    num_attended: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_attended <= self.num_tokens:
            raise ValueError(
                f"num_attended must be from 1 to the store's {self.num_tokens} tokens, "
                f"got {self.num_attended}"
            )


def rotation_size(width: int) -> int:
    """Return how many neighbouring values of a row are rotated together: a power of two that divides it."""
    return width & -width


def part_size(width: int) -> int:
    """Return how many neighbouring values of a rotated row share a step: 64 or 32 of them, or all.

    The largest of many values makes a large step. Values that are not rotated together differ in size: those
    of a latent and of its rotary key.
    """
    size = min(rotation_size(width), _LARGEST_PART)
    return size if size >= _SMALLEST_PART else width


def stored_row_bytes(width: int) -> int:
    """Return the bytes of one token's row of `width` values in a store: its codes and steps."""
    return width * STORE_BITS // 8 + width // part_size(width) * _STEP_BYTES


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """A layout with the integers that a prompt fixes for the life of its sequence.

    `ring_size` is the layout's `num_recent`, or more where unused kept entries are lent to the ring. The kept
    entries in use are the last of the slot, so that a longer ring never meets them. Conversely, the ring
    lends the entries of the window's first `num_lent` tokens to further candidates. Decode writes to these
    entries first, one by one.
    """

    layout: SlotLayout
    window_start: int
    ring_size: int
    num_lent: int = 0

    @property
    def candidates_end(self) -> int:
        """The first prompt token that is held for its position rather than its score."""
        return self.window_start + self.num_lent

    @property
    def num_kept_used(self) -> int:
        return self.layout.num_kept_used(self.window_start)

    @property
    def kept_start(self) -> int:
        """The entry of the first kept token."""
        return self.layout.capacity - self.num_kept_used

    def entry(self, index: int) -> int:
        """Return the entry that a token is written to: a sink's, or one from the window start on.

        It depends on the token's index alone, so that a decode step needs no cursor.
        """
        sink = self.layout.num_sink
        return index if index < sink else sink + (index - sink) % self.ring_size

    def direct_entry(self, index: int) -> int:
        """Return the entry of a prompt token when the whole prompt fits: kept entries hold the candidates."""
        sink = self.layout.num_sink
        if sink <= index < self.window_start:
            return self.kept_start + index - sink
        return self.entry(index)

    def ring_index(self, offset: int, num_tokens: int) -> int | None:
        """Return the index of the token in ring entry `offset` after `num_tokens` tokens; None: not live."""
        # The newest token whose index is congruent to the entry's offset, modulo the ring's size.
        last = num_tokens - 1
        index = last - (last - self.layout.num_sink - offset) % self.ring_size
        return index if index >= self.window_start else None

    def num_live(self, num_tokens: int) -> int:
        """Return how many entries hold a token after `num_tokens` tokens, the whole prompt among them."""
        return min(num_tokens, self.layout.num_sink) + self._num_in_ring(num_tokens) + self.num_kept_used

    def num_ring_wraps(self, num_tokens: int) -> int:
        """Return how many times the ring has begun to overwrite itself."""
        return max(num_tokens - self.window_start - 1, 0) // self.ring_size

    def is_exact(self, num_tokens: int) -> bool:
        """Return whether every token written is still held."""
        all_kept = self.window_start - self.layout.num_sink <= self.layout.num_kept
        return all_kept and num_tokens <= self.window_start + self.ring_size

    def _num_in_ring(self, num_tokens: int) -> int:
        return min(max(num_tokens - self.window_start, 0), self.ring_size)

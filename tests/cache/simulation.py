"""A slot filled token by token, with Python lists and a write cursor.

There is no index arithmetic here, and nothing of `cache` but the sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from cache.layout import SlotLayout


class SimulatedSlot:
    """A prompt that was just read, and the tokens written after it. `entries` has each entry's token
    index.
    """

    def __init__(
        self,
        layout: SlotLayout,
        prompt_window: int,
        num_prompt_tokens: int,
        lend_kept: bool,
        kept: Sequence[int] | None = None,
    ) -> None:
        rest = list(range(num_prompt_tokens))[layout.num_sink :]
        window = rest[-prompt_window:]
        self.candidates = rest[: len(rest) - len(window)]
        self.kept = list(kept) if kept is not None else self.candidates[: layout.num_kept]
        num_unused = layout.num_kept - len(self.kept)
        self._sinks: list[int | None] = [None] * layout.num_sink
        self._ring: list[int | None] = [None] * (layout.num_recent + (num_unused if lend_kept else 0))
        self._unused: list[int | None] = [] if lend_kept else [None] * num_unused
        self._cursor = 0
        self.num_written = self.num_overwritten = 0
        for _ in range(num_prompt_tokens):
            self.write()
        self._ring = [token if token in window else None for token in self._ring]
        self.num_overwritten = 0  # from here on, the tokens that decode overwrites

    @property
    def entries(self) -> list[int | None]:
        return [*self._sinks, *self._ring, *self._unused, *self.kept]

    @property
    def ring_size(self) -> int:
        return len(self._ring)

    @property
    def is_exact(self) -> bool:
        return set(range(self.num_written)) <= set(self.entries)

    def write(self) -> int:
        """Write the next token and return the entry it went to."""
        token = self.num_written
        self.num_written += 1
        if None in self._sinks:
            entry = self._sinks.index(None)
            self._sinks[entry] = token
            return entry
        offset = self._cursor
        if self._ring[offset] is not None:
            self.num_overwritten += 1
        self._ring[offset] = token
        self._cursor = 0 if offset == len(self._ring) - 1 else offset + 1
        return len(self._sinks) + offset


@dataclass(frozen=True)
class Case:
    """A layout, and a prompt to place in it."""

    layout: SlotLayout
    prompt_window: int
    num_prompt_tokens: int
    lend_kept: bool

    def simulate(self, kept: Sequence[int] | None = None) -> SimulatedSlot:
        return SimulatedSlot(self.layout, self.prompt_window, self.num_prompt_tokens, self.lend_kept, kept)

    @property
    def num_steps(self) -> int:
        """Decode steps that fill the sinks and wrap any ring twice."""
        return 3 * self.layout.capacity + 3

    @property
    def fits(self) -> bool:
        return self.simulate().is_exact


@st.composite
def layouts(draw: st.DrawFn) -> SlotLayout:
    return SlotLayout(draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 5)))


@st.composite
def cases(draw: st.DrawFn, layout: SlotLayout | None = None) -> Case:
    """Prompts of all lengths, most of them close to a boundary."""
    sizes = layout if layout is not None else draw(layouts())
    window = draw(st.integers(1, sizes.num_recent))
    full_window = sizes.num_sink + window
    boundary = draw(
        st.sampled_from([1, sizes.num_sink, full_window, full_window + sizes.num_kept, sizes.capacity])
    )
    num_prompt_tokens = boundary + draw(st.integers(-1, 1) | st.integers(2, 20))
    return Case(sizes, window, max(num_prompt_tokens, 1), draw(st.booleans()))

"""The sizes and options of a cache, in plain values."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """`[ sinks | ring | kept ]`, and how the kept tokens are chosen (arXiv 2511.03092, sections 2.4, 3.2)."""

    num_sink: int
    num_recent: int
    num_kept: int
    prompt_window: int  # this many of the prompt's last tokens go into the ring
    lend_kept: bool = False  # unused kept entries are added to the ring
    num_lent: int = (
        0  # entries of the ring's oldest tokens that hold more of the best, if a prompt does not fit
    )
    observation_window: int = 1
    observation_half_life: int = 0  # distance from the prompt's end that halves a vote; 0: none
    least_vote: float = 0.0  # what a vote counts at least
    softmax_over: Literal["candidates", "all"] = "candidates"
    pooling: Literal["average", "maximum"] = "average"
    pooling_size: int = 1
    pooling_shift: int = 0  # how many tokens further back the pooled neighbours are
    pooling_half_life: int = 0  # distance that halves a neighbour's score; 0: none
    head_reduction: Literal["mean", "maximum"] = "mean"
    query_reduction: Literal["sum", "maximum"] = "sum"
    num_echoed: int = 0  # tokens of the question that are read again behind the prompt, and vote
    selection_chunk: int = 1  # how many neighbours are kept or dropped together
    layer_kept: tuple[int, ...] = ()  # how many tokens each layer keeps, where they differ
    leading_layer: int | None = None  # the layers after it also use its scores
    # Of the tokens that left the ring, which are held in 4 bits: how many are read. None: they are lost.
    num_attended: int | None = None

    @classmethod
    def full(cls, length: int) -> "Recipe":
        """Room for every token of a sequence of up to `length`."""
        return cls(num_sink=0, num_recent=length, num_kept=0, prompt_window=length)

    @classmethod
    def sliding(cls, window: int) -> "Recipe":
        """The last `window` tokens: a sliding-window layer reads no others."""
        return cls(num_sink=0, num_recent=window, num_kept=0, prompt_window=window)

    def of_layer(self, index: int) -> "Recipe":
        """Return the recipe of one layer."""
        return self.with_options(num_kept=self.layer_kept[index]) if self.layer_kept else self

    @property
    def capacity(self) -> int:
        return self.num_sink + self.num_recent + self.num_kept

    def with_options(self, **options: object) -> "Recipe":
        return replace(self, **options)  # type: ignore[arg-type]  # the tests' matrices are made of names and values

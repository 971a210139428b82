"""The sizes and options of a cache, in plain values."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """`[ sinks | ring | kept ]`, and how the kept tokens are chosen (SnapStream, arXiv 2511.03092, sections 2.4 and 3.2)."""

    num_sink: int
    num_recent: int
    num_kept: int
    prompt_window: int  # this many of the prompt's last tokens go into the ring
    lend_kept: bool = False  # what the kept tokens leave empty is added to the ring
    num_lent: int = 0  # of a prompt that does not fit, more of the best tokens stand in place of so many of the ring's oldest
    observation_window: int = 1
    observation_half_life: int = 0  # a vote so far from the prompt's end counts half; 0: all alike
    softmax_over: Literal["candidates", "all"] = "candidates"
    pooling: Literal["average", "maximum"] = "average"
    pooling_size: int = 1
    pooling_shift: int = 0  # so much further back the pooled neighbours lie
    pooling_half_life: int = 0  # a neighbour so far away counts half; 0: all alike
    head_reduction: Literal["mean", "maximum"] = "mean"
    query_reduction: Literal["sum", "maximum"] = "sum"
    selection_chunk: int = 1  # so many neighbours are kept or dropped together
    layer_kept: tuple[int, ...] = ()  # how many tokens each layer keeps, where they differ
    leading_layer: int | None = None  # the layers behind it choose by its votes too

    @classmethod
    def full(cls, length: int) -> "Recipe":
        """Room for every token of a sequence of up to `length`."""
        return cls(num_sink=0, num_recent=length, num_kept=0, prompt_window=length)

    @classmethod
    def sliding(cls, window: int) -> "Recipe":
        """The last `window` tokens: all that a sliding-window layer ever reads."""
        return cls(num_sink=0, num_recent=window, num_kept=0, prompt_window=window)

    def of_layer(self, index: int) -> "Recipe":
        """What one layer holds."""
        return self.with_options(num_kept=self.layer_kept[index]) if self.layer_kept else self

    @property
    def capacity(self) -> int:
        return self.num_sink + self.num_recent + self.num_kept

    def with_options(self, **options: object) -> "Recipe":
        return replace(self, **options)  # type: ignore[arg-type]  # the tests' matrices are made of names and values

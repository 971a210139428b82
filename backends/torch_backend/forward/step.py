"""One forward pass as the cache sees it: where its tokens are written, and which entries each query sees.

These are values. `forward.plan` builds them from a batch, and `forward.cache` carries them out. Layers that
hold their tokens alike are one `LayerKind` and share one `KindStep`.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from backends.torch_backend.model.attention import MASKED
from cache.policy import CachePolicy
from cache.scorer import WindowScorer


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that hold their tokens alike.

    `sliding_window` is the model's; None where a query sees all tokens before it.
    """

    policy: CachePolicy
    sliding_window: int | None

    @property
    def scorer(self) -> WindowScorer | None:
        """The policy's scorer; None where there are no kept entries to choose tokens for."""
        return self.policy.scorer if self.policy.layout.num_kept > 0 else None


@dataclass(frozen=True, slots=True)
class KindStep:
    """A forward pass for the layers of one kind. It reads the first `read_length` entries of each row."""

    entries: Tensor  # [row, token]: where each token is written
    # float32 [row, query, entry]: the mask of the last entries read, 0 where a query sees one and `MASKED`
    # where not.
    bias: Tensor
    num_unmasked: int = 0  # entries before those of `bias`, which every query sees
    # [row, query], only where entries are in the order of the sequence: the last entry that each query sees,
    # −1 for padding. The last entry read is the last query's own.
    last_seen: Tensor | None = None
    # [row], only in decode steps of a policy with a store: how many tokens it holds after the step. The
    # newest of them is the one that the step's token overwrites in the ring.
    num_stored: Tensor | None = None

    @property
    def read_length(self) -> int:
        return self.num_unmasked + self.bias.shape[2]

    def of_best(self, ranks: Tensor, num_best: int) -> "KindStep":
        """Return the pass in which each query sees the best of its entries alone: [row, query, entry]."""
        bias = pad(self.bias, (self.num_unmasked, 0))
        best = (ranks + bias).topk(num_best, dim=-1).indices
        is_worse = torch.ones_like(ranks, dtype=torch.bool).scatter(-1, best, value=False)
        return KindStep(self.entries, torch.where(is_worse, MASKED, bias))

    def of_last(self, num_tokens: int) -> "KindStep":
        """Return the pass of each row's last `num_tokens` tokens alone."""
        return KindStep(
            self.entries[:, -num_tokens:],
            self.bias[:, -num_tokens:],
            self.num_unmasked,
            None if self.last_seen is None else self.last_seen[:, -num_tokens:].contiguous(),
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """A row whose last queries vote on which tokens of its prompt are kept.

    The sinks and the newest of the scratch's first `num_held` entries are kept anyway. The observing queries
    are the last ones before entry `end`: `num_queries` of them, or as many as the scorer's window for None.
    The first `num_echoed` of them echo the question, and their votes count `echo_weight`. With `scores_all`,
    nothing is kept anyway: all tokens are scored, and nothing is chosen.
    """

    row: int
    scratch: int
    num_held: int
    end: int
    num_queries: int | None = None
    num_echoed: int = 0
    echo_weight: float = 1.0
    scores_all: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward pass writes and reads."""

    rows: Tensor  # [row]: the slot of each row, or its scratch
    view: slice | None  # the same, where they are next to each other: they are read without a copy
    kinds: tuple[KindStep, ...]


@dataclass(frozen=True, slots=True)
class DecodeStep(Step):
    """The next token of each of the first slots, or several next tokens of some slots."""

    is_live: Tensor  # [row]: False for a slot without a token, whose states stay as they are


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one row, which are its last ones; padding is before them."""

    target: int  # the slot or the scratch that they are read into
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptStep(Step):
    """Chunks of prompts."""

    # How many last tokens of each row have outputs that are read, beside the cache and the votes; None: all.
    num_outputs: int | None
    chunks: tuple[Chunk, ...]  # of the first rows; the others are padding

    def of_last(self, num_tokens: int) -> Self:
        """Return the step of each row's last `num_tokens` tokens alone, which write and vote as before."""
        return replace(self, kinds=tuple(kind.of_last(num_tokens) for kind in self.kinds))


@dataclass(frozen=True, slots=True)
class DirectStep(PromptStep):
    """Chunks of prompts that fit their slots, written straight into these."""


@dataclass(frozen=True, slots=True)
class ScratchStep(PromptStep):
    """Chunks of prompts that are read in scratches.

    `observations` are the rows whose queries vote in this step.
    """

    observations: tuple[Observation, ...]
    query_entry: Tensor  # [row, query]: the entry of each query's own token in its scratch, −1 for padding
    # Whether the tokens belong to the sequence. Those that are read for their votes alone leave its states.
    advances_states: bool = True

    def of_last(self, num_tokens: int) -> Self:
        shortened = PromptStep.of_last(self, num_tokens)
        return replace(shortened, query_entry=self.query_entry[:, -num_tokens:])

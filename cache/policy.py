"""Cache policies: a slot layout, how much of a prompt's end enters the ring, how the rest is scored, and what a slot admits."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.budgets import share_kept
from cache.layout import SlotLayout, SlotPlacement
from cache.scorer import WindowScorer


class PolicyName(enum.StrEnum):
    FULL = "full"
    STREAMING_LLM = "streaming-llm"
    SNAPKV = "snapkv"
    SNAPSTREAM = "snapstream"


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What becomes of a sequence's keys and values.

    `evicts` says whether decode may overwrite its ring. A policy that does not evict admits only sequences that fit their slot. Where the
    model's layers (those without a sliding window) do not all keep as much, `layout` is that of the average layer.
    """

    name: PolicyName
    layout: SlotLayout
    prompt_window: int  # at most this many of the prompt's last tokens enter the ring
    scorer: WindowScorer | None
    evicts: bool
    lend_kept: bool = False  # unused kept entries lengthen the ring
    num_lent: int = 0  # ring entries that hold more of a prompt's best tokens until decode takes them, where the prompt does not fit
    layer_kept: tuple[int, ...] = ()  # each layer's kept entries, where they differ
    leading_layer: int | None = None  # of those with `layer_kept`: the later ones choose by its votes too

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_window <= self.layout.num_recent:
            raise ValueError(
                f"prompt_window must be from 1 to num_recent = {self.layout.num_recent}, got {self.prompt_window}"
            )
        num_held = self.prompt_window - self.num_lent
        if self.scorer is not None and self.scorer.observation_window > num_held:
            raise ValueError(
                f"observation_window must be at most the prompt window of {num_held}, got {self.scorer.observation_window}"
            )
        if self.layout.num_kept > 0 and self.scorer is None:
            raise ValueError(f"num_kept = {self.layout.num_kept} needs a scorer")

    @property
    def max_direct_tokens(self) -> int:
        """The longest prompt of which a slot loses nothing, in any layer."""
        return self.layout.num_sink + self.prompt_window + min(self.layer_kept, default=self.layout.num_kept)

    def with_layer_scores(
        self, scores: Sequence[float], most: int, leading_layer: int | None = None
    ) -> "CachePolicy":
        """Return the policy with its kept entries shared out between layers of these scores, no layer having more than `most`.

        Where the shares differ, the layers behind the leading one, if any, choose by its votes too.
        """
        kept = share_kept(self.layout.num_kept, scores, most)
        return self if len(set(kept)) < 2 else replace(self, layer_kept=kept, leading_layer=leading_layer)

    def of_layer(self, number: int) -> "CachePolicy":
        """Return the policy of one layer, counted among those without a sliding window."""
        if not self.layer_kept:
            return self
        return replace(
            self,
            layout=replace(self.layout, num_kept=self.layer_kept[number]),
            layer_kept=(),
            leading_layer=None,
        )

    def place(self, num_prompt_tokens: int) -> SlotPlacement:
        """Return where a prompt of this length lies in a slot."""
        return self.layout.place(
            num_prompt_tokens, self.prompt_window, lend_kept=self.lend_kept, num_lent=self.num_lent
        )

    def num_live(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many entries of a layer hold a token of such a prompt once `num_tokens` were written; the average of its layers."""
        layers = self._distinct_layers()
        num_live = sum(
            number * layer.place(num_prompt_tokens).num_live(num_tokens) for layer, number in layers
        )
        return num_live // sum(number for _, number in layers)

    def is_exact(self, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Whether every layer still holds all of a sequence of `num_tokens` tokens with such a prompt."""
        return all(
            layer.place(num_prompt_tokens).is_exact(num_tokens) for layer, _ in self._distinct_layers()
        )

    def _distinct_layers(self) -> list[tuple["CachePolicy", int]]:
        """Return the policies of layers that keep unlike numbers, and how many layers have each: a deep model has few."""
        if not self.layer_kept:
            return [(self, 1)]
        return [
            (self.of_layer(self.layer_kept.index(kept)), number)
            for kept, number in Counter(self.layer_kept).items()
        ]

    def max_output_tokens(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return how many tokens may follow a prompt of this length; negative when the prompt itself is too long.

        The last token drawn is never written, but it counts: that is how users know `max_model_len`.
        """
        limit = max_model_len - num_prompt_tokens
        if self.evicts:
            return limit
        placement = self.place(num_prompt_tokens)
        return min(limit, placement.window_start + placement.ring_size - num_prompt_tokens)

    def needed_capacity(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Return the entries that a slot needs to admit so many tokens after a prompt, with as many kept; of policies that do not evict."""
        window_start = (
            0 if self.scorer is None else self.layout.window_start(num_prompt_tokens, self.prompt_window)
        )  # full: no candidates
        return num_prompt_tokens + num_output_tokens - window_start + self.layout.num_kept


def full(capacity: int) -> CachePolicy:
    """Everything is held, of sequences of up to `capacity` tokens."""
    return CachePolicy(
        PolicyName.FULL, SlotLayout(0, capacity, 0), prompt_window=capacity, scorer=None, evicts=False
    )


def streaming_llm(num_sink: int, num_recent: int) -> CachePolicy:
    """The first and the last tokens (StreamingLLM, arXiv 2309.17453), at their true positions."""
    return CachePolicy(
        PolicyName.STREAMING_LLM,
        SlotLayout(num_sink, num_recent, 0),
        prompt_window=num_recent,
        scorer=None,
        evicts=True,
    )


def snapkv(max_new_tokens: int, num_kept: int, scorer: WindowScorer) -> CachePolicy:
    """The prompt's best `num_kept` tokens, its observation window, and room for `max_new_tokens` (SnapKV, arXiv 2404.14469)."""
    window = scorer.observation_window
    layout = SlotLayout(0, window + max_new_tokens, num_kept)
    return CachePolicy(PolicyName.SNAPKV, layout, prompt_window=window, scorer=scorer, evicts=False)


def snapstream(
    num_sink: int,
    num_recent: int,
    num_kept: int,
    scorer: WindowScorer,
    *,
    lend_kept: bool = False,
    lend_ring: bool = False,
) -> CachePolicy:
    """Sinks, a ring of the newest tokens and the prompt's best tokens (SnapStream, arXiv 2511.03092), and what the two lend each other."""
    layout = SlotLayout(num_sink, num_recent, num_kept)
    num_lent = (
        max(0, min(num_recent * 3 // 4, num_recent - scorer.observation_window))
        if lend_ring and num_kept > 0
        else 0
    )
    return CachePolicy(
        PolicyName.SNAPSTREAM, layout, num_recent, scorer, evicts=True, lend_kept=lend_kept, num_lent=num_lent
    )

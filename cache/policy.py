"""Cache policies: a slot's layout, what enters the ring, how the rest is scored, and what a slot admits."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.budgets import share_kept
from cache.layout import SlotLayout, SlotPlacement, StoreLayout
from cache.scorer import WindowScorer

# The prompt's last tokens that a slot holds in any case. They are fewer than the tokens of a wide observation
# window: the other ones vote, and are held only if their own score is high enough.
HELD_WINDOW = 32


class PolicyName(enum.StrEnum):
    FULL = "full"
    STREAMING_LLM = "streaming-llm"
    SNAPKV = "snapkv"
    SNAPSTREAM = "snapstream"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """Which of a sequence's keys and values a slot holds.

    `evicts` says whether decode may lose what it overwrites in the ring. A policy that does not evict admits
    only sequences that fit their slot. With a `store`, tokens that leave the ring go there. Where layers
    without a sliding window keep different numbers of tokens, `layout` is the average layer's.
    """

    name: PolicyName
    layout: SlotLayout
    prompt_window: int  # at most this many of the prompt's last tokens enter the ring
    scorer: WindowScorer | None
    evicts: bool
    lend_kept: bool = False  # unused kept entries lengthen the ring
    # Ring entries that hold more of a prompt's best tokens until decode writes to them, where the prompt does
    # not fit.
    num_lent: int = 0
    layer_kept: tuple[
        int, ...
    ] = ()  # the kept entries of each layer without a sliding window, where they differ
    leading_layer: int | None = None  # index into `layer_kept`: the layers after this one also use its scores
    store: StoreLayout | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_window <= self.layout.num_recent:
            raise ValueError(
                f"prompt_window must be from 1 to num_recent = {self.layout.num_recent}, "
                f"got {self.prompt_window}"
            )
        if self.layout.num_kept > 0 and self.scorer is None:
            raise ValueError(f"num_kept = {self.layout.num_kept} needs a scorer")

    @property
    def capacity(self) -> int:
        """How many tokens a slot of the average layer holds."""
        return self.layout.capacity + (self.store.num_tokens if self.store is not None else 0)

    @property
    def max_direct_tokens(self) -> int:
        """The longest prompt that needs no kept entries, so that a slot holds it in its order."""
        return self.layout.num_sink + self.prompt_window

    @property
    def max_exact_prompt(self) -> int:
        """The longest prompt that a slot holds as it is, in any layer."""
        return self.layout.num_sink + self.prompt_window + min(self.layer_kept, default=self.layout.num_kept)

    def must_choose(self, num_prompt_tokens: int) -> bool:
        """Return whether a layer cannot hold all of a prompt."""
        return num_prompt_tokens > self.max_exact_prompt

    @property
    def num_echoed(self) -> int:
        """Return how many tokens of a question are read again where the policy must choose."""
        return 0 if self.scorer is None or self.layout.num_kept == 0 else self.scorer.num_echoed

    def with_layer_scores(
        self, scores: Sequence[float], most: int, leading_layer: int | None = None
    ) -> "CachePolicy":
        """Return the policy with its kept entries shared out by these layer scores, at most `most` each.

        `leading_layer` counts only where the shares differ.
        """
        kept = share_kept(self.layout.num_kept, scores, most)
        return self if len(set(kept)) < 2 else replace(self, layer_kept=kept, leading_layer=leading_layer)

    def of_layer(self, index: int) -> "CachePolicy":
        """Return the policy of one layer, counted among those without a sliding window."""
        if not self.layer_kept:
            return self
        layout = replace(self.layout, num_kept=self.layer_kept[index])
        return replace(self, layout=layout, layer_kept=(), leading_layer=None)

    def place(self, num_prompt_tokens: int) -> SlotPlacement:
        """Return the placement of a prompt of this length in a slot."""
        return self.layout.place(
            num_prompt_tokens, self.prompt_window, lend_kept=self.lend_kept, num_lent=self.num_lent
        )

    def num_live(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many tokens the average layer holds once `num_tokens` tokens are written."""
        if self.store is not None:
            return num_tokens
        layers = self._distinct_layers()
        num_live = sum(count * layer.place(num_prompt_tokens).num_live(num_tokens) for layer, count in layers)
        return num_live // sum(count for _, count in layers)

    def num_quantized(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens are in the store, in 4 bits."""
        return max(num_tokens - self.layout.capacity, 0) if self.store is not None else 0

    def is_exact(self, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Return whether every layer still holds all of `num_tokens` tokens as they are, prompt included."""
        return all(
            layer.place(num_prompt_tokens).is_exact(num_tokens) for layer, _ in self._distinct_layers()
        )

    def ring_room(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many tokens may follow `num_tokens` before one overwrites another; negative later."""
        placements = [layer.place(num_prompt_tokens) for layer, _ in self._distinct_layers()]
        return min(place.window_start + place.ring_size for place in placements) - num_tokens

    def num_exact_tokens(self, max_model_len: int) -> int:
        """Return up to how many tokens every admitted sequence is held as it is, with any prompt length."""
        sizes = []
        for layer, _ in self._distinct_layers():
            layout = layer.layout
            if layer.lend_kept:
                sizes.append(layout.capacity)
            elif layer.evicts:
                sizes.append(layout.num_sink + layout.num_recent)
            else:
                sizes.append(layout.num_sink + layer.prompt_window + layout.num_kept)
        return min(max_model_len, *sizes)

    def exact_output_tokens(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return how many tokens may follow a prompt until one is not held as it is; negative if one is not
        already.
        """
        rooms = []
        for layer, _ in self._distinct_layers():
            placement = layer.place(num_prompt_tokens)
            if not placement.is_exact(num_prompt_tokens):
                return -1
            # The last token drawn is never written.
            rooms.append(placement.window_start + placement.ring_size + 1 - num_prompt_tokens)
        return min(self.max_output_tokens(num_prompt_tokens, max_model_len), *rooms)

    def _distinct_layers(self) -> list[tuple["CachePolicy", int]]:
        """Return each different policy of a layer and how many layers have it. A deep model has few."""
        if not self.layer_kept:
            return [(self, 1)]
        return [
            (self.of_layer(self.layer_kept.index(kept)), count)
            for kept, count in Counter(self.layer_kept).items()
        ]

    def max_output_tokens(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return how many tokens may follow a prompt; negative when the prompt itself is too long.

        The last token drawn is never written, but it counts: users know `max_model_len` as the sum of both
        lengths.
        """
        limit = max_model_len - num_prompt_tokens
        if self.evicts:
            return limit
        if self.store is not None:
            return min(limit, self.capacity - num_prompt_tokens)
        placement = self.place(num_prompt_tokens)
        return min(limit, placement.window_start + placement.ring_size - num_prompt_tokens)

    def needed_capacity(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Return the capacity that a slot with the same `num_kept` needs for this prompt and output.

        Only for policies that do not evict.
        """
        # A policy without a scorer has no candidates: all of the prompt is in the ring.
        window_start = (
            0 if self.scorer is None else self.layout.window_start(num_prompt_tokens, self.prompt_window)
        )
        return num_prompt_tokens + num_output_tokens - window_start + self.layout.num_kept


def held_window(scorer: WindowScorer) -> int:
    """Return how many of a prompt's last tokens are held with any score."""
    return min(scorer.observation_window, HELD_WINDOW)


def full(capacity: int) -> CachePolicy:
    """Hold everything, of sequences of up to `capacity` tokens."""
    layout = SlotLayout(0, capacity, 0)
    return CachePolicy(PolicyName.FULL, layout, prompt_window=capacity, scorer=None, evicts=False)


def streaming_llm(num_sink: int, num_recent: int) -> CachePolicy:
    """Hold the first and the last tokens (StreamingLLM, arXiv 2309.17453), at their true positions."""
    layout = SlotLayout(num_sink, num_recent, 0)
    return CachePolicy(PolicyName.STREAMING_LLM, layout, prompt_window=num_recent, scorer=None, evicts=True)


def snapkv(max_new_tokens: int, num_kept: int, scorer: WindowScorer) -> CachePolicy:
    """Hold the prompt's best tokens, its observation window and the answer (SnapKV, arXiv 2404.14469)."""
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
    """Hold sinks, a ring of the newest tokens, and the prompt's best tokens (SnapStream, arXiv 2511.03092).

    With `lend_ring`, three quarters of the ring hold more of the prompt's best tokens until decode overwrites
    them; the prompt's last tokens stay.
    """
    layout = SlotLayout(num_sink, num_recent, num_kept)
    num_lent = 0
    if lend_ring and num_kept > 0:
        num_lent = max(0, min(num_recent * 3 // 4, num_recent - held_window(scorer)))
    return CachePolicy(
        PolicyName.SNAPSTREAM, layout, num_recent, scorer, evicts=True, lend_kept=lend_kept, num_lent=num_lent
    )


def sparse(num_sink: int, num_recent: int, num_stored: int, num_attended: int) -> CachePolicy:
    """Hold everything: sinks and the newest tokens as they are, the others in 4 bits.

    As YAKV (arXiv 2604.08426), a step attends to sinks and ring and to the `num_attended` best of the others.
    """
    store = StoreLayout(num_stored, min(num_attended, num_stored)) if num_stored > 0 else None
    layout = SlotLayout(num_sink, num_recent, 0)
    return CachePolicy(PolicyName.SPARSE, layout, num_recent, scorer=None, evicts=False, store=store)

"""Cache policies: a slot layout, how much of a prompt's end enters the ring, how the rest is scored, and what a slot admits."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.budgets import share_kept
from cache.layout import SlotLayout, SlotPlacement


class PolicyName(enum.StrEnum):
    FULL = "full"
    STREAMING_LLM = "streaming-llm"
    SNAPKV = "snapkv"
    SNAPSTREAM = "snapstream"


class SoftmaxDomain(enum.StrEnum):
    """The keys over which an observation query's attention is normalised."""

    CANDIDATES = "candidates"  # SnapStream, equation 3
    ALL = "all"  # SnapKV, and SnapStream's listing 6


class Pooling(enum.StrEnum):
    AVERAGE = "average"
    MAXIMUM = "maximum"


class QueryReduction(enum.StrEnum):
    """How the votes of the observation window's queries become one."""

    SUM = "sum"  # SnapKV and SnapStream
    MAXIMUM = "maximum"  # one query that looks for a token is enough, however many look elsewhere


class HeadReduction(enum.StrEnum):
    """How the votes of the query heads that share a KV head become one."""

    MEAN = "mean"
    MAXIMUM = "maximum"


class LayerBudgets(enum.StrEnum):
    """How the kept entries of all layers are shared out between them."""

    EQUAL = "equal"
    MEASURED = "measured"  # by how much of each layer's attention looks things up, found out when the model is loaded


@dataclass(frozen=True, slots=True)
class WindowScorer:
    """Scores prompt tokens by the attention that the last `observation_window` prompt tokens pay to them (SnapKV, arXiv 2404.14469).

    As it stands it is SnapStream's published recipe, as far as that is known; `DEFAULT_SCORERS` has what is used where nobody says more.
    A token's score is pooled over `pooling_size` tokens centred `pooling_shift` tokens before it, so that a token that is attended to
    lends its score to more of those that follow it. With a `pooling_half_life`, what it lends halves with every so many tokens of
    distance, so that many finds keep what is nearest to them where there is room for little; 0: all alike. With a `selection_chunk`
    above 1, chunks of so many neighbouring tokens are kept whole, those with the highest mean score (ChunkKV, arXiv 2502.00299). With an
    `observation_half_life`, the vote of a token so far from the prompt's end counts half, since the question is more often there; 0: all
    count alike.
    """

    observation_window: int = 32
    observation_half_life: int = 0
    softmax_domain: SoftmaxDomain = SoftmaxDomain.CANDIDATES
    pooling: Pooling = Pooling.AVERAGE
    pooling_size: int = 5
    pooling_shift: int = 0
    pooling_half_life: int = 0
    head_reduction: HeadReduction = HeadReduction.MEAN
    query_reduction: QueryReduction = QueryReduction.SUM
    selection_chunk: int = 1

    def __post_init__(self) -> None:
        if self.observation_window < 1:
            raise ValueError(f"observation_window must be at least 1, got {self.observation_window}")
        if self.observation_half_life < 0:
            raise ValueError(f"observation_half_life must be at least 0, got {self.observation_half_life}")
        if self.pooling_size < 1 or self.pooling_size % 2 == 0:
            raise ValueError(f"pooling_size must be odd and at least 1, got {self.pooling_size}")
        if not 0 <= self.pooling_shift <= self.pooling_size // 2:
            raise ValueError(
                f"pooling_shift must be from 0 to half the pooling_size of {self.pooling_size}, got {self.pooling_shift}"
            )
        if self.pooling_half_life < 0:
            raise ValueError(f"pooling_half_life must be at least 0, got {self.pooling_half_life}")
        if self.selection_chunk < 1:
            raise ValueError(f"selection_chunk must be at least 1, got {self.selection_chunk}")


# SnapKV's is as published. SnapStream's keeps what the question looks for, however little else does, together with what follows it.
DEFAULT_SCORERS = {
    PolicyName.SNAPKV: WindowScorer(softmax_domain=SoftmaxDomain.ALL),
    PolicyName.SNAPSTREAM: WindowScorer(
        observation_half_life=8,
        pooling=Pooling.MAXIMUM,
        pooling_size=29,
        pooling_shift=7,
        pooling_half_life=6,
        query_reduction=QueryReduction.MAXIMUM,
    ),
}


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


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """A policy as users ask for it: the sizes left out (None) follow from the others, 2,048 entries and 4 sinks, the rest half and half.

    Left out, the capacity of `full` is the longest sequence's.
    """

    name: PolicyName = PolicyName.SNAPSTREAM
    slot_capacity: int | None = None
    num_sink: int | None = None
    num_recent: int | None = None
    num_kept: int | None = None
    scorer: WindowScorer | None = None  # None: the policy's own of `DEFAULT_SCORERS`
    lend_kept: bool = False
    lend_ring: bool | None = None  # None: `snapstream` does
    layer_budgets: LayerBudgets | None = None  # None: measured for `snapstream`, equal for the others
    share_votes: bool | None = None  # None: where layers are measured

    @property
    def measures_layers(self) -> bool:
        """Whether the resolved policy wants its layers' scores."""
        return self.name is PolicyName.SNAPSTREAM and self.layer_budgets is not LayerBudgets.EQUAL

    @property
    def has_leading_layer(self) -> bool:
        """Whether layers choose by the votes of the one before them that looks things up most."""
        return self.measures_layers and self.share_votes is not False

    @property
    def least_capacity(self) -> int:
        """The fewest entries of a slot with which `resolve` finds room for what the other options ask for."""
        num_sink, num_recent, num_kept = self._given_sizes()
        if num_recent is None:
            num_recent = self._least_recent
            num_kept = (
                num_recent - 1 if num_kept is None else num_kept
            )  # halves: of an odd rest, the ring has the larger
        return num_sink + num_recent + (num_kept or 0)

    def resolve(self, max_model_len: int) -> CachePolicy:
        """Return the policy for sequences of up to `max_model_len` tokens. Raises ValueError that names the option and its limit."""
        self._check_applicable()
        num_sink, num_recent, num_kept = self._sizes(max_model_len)
        if self.name is PolicyName.FULL:
            return full(min(num_recent, max_model_len))  # a longer slot would never be filled
        if self.name is PolicyName.STREAMING_LLM:
            return streaming_llm(num_sink, num_recent)
        scorer = self.scorer or DEFAULT_SCORERS[self.name]
        if self.name is PolicyName.SNAPSTREAM:
            lend_ring = self.lend_ring is not False
            return snapstream(
                num_sink, num_recent, num_kept, scorer, lend_kept=self.lend_kept, lend_ring=lend_ring
            )
        return snapkv(num_recent - scorer.observation_window, num_kept, scorer)

    def _check_applicable(self) -> None:
        allowed = _SIZES_OF[self.name]
        for option in ("slot_capacity", "num_sink", "num_recent", "num_kept"):
            if getattr(self, option) is not None and option not in allowed:
                raise ValueError(
                    f"{option} is not an option of policy {self.name}, whose sizes are {', '.join(allowed)}"
                )
        for option in ("lend_kept", "lend_ring"):
            if getattr(self, option) and self.name is not PolicyName.SNAPSTREAM:
                raise ValueError(f"{option} is not an option of policy {self.name}")
        if self.layer_budgets is LayerBudgets.MEASURED and self.name is not PolicyName.SNAPSTREAM:
            raise ValueError(f"layer_budgets {self.layer_budgets} is not an option of policy {self.name}")
        if self.share_votes and not self.measures_layers:
            raise ValueError(
                f"share_votes needs policy {PolicyName.SNAPSTREAM} with layer_budgets {LayerBudgets.MEASURED}"
            )

    @property
    def _observation_window(self) -> int | None:
        own = DEFAULT_SCORERS.get(self.name)
        return None if own is None else (self.scorer or own).observation_window

    @property
    def _least_recent(self) -> int:
        """The smallest ring: it holds the observation window, and of snapkv, which does not evict, a token of the answer too."""
        return (self._observation_window or 1) + (self.name is PolicyName.SNAPKV)

    def _given_sizes(self) -> tuple[int, int | None, int | None]:
        """Return sinks, ring and kept entries as far as they do not follow from the capacity."""
        allowed = _SIZES_OF[self.name]
        num_sink = 4 if self.num_sink is None else self.num_sink
        return (
            num_sink if "num_sink" in allowed else 0,
            self.num_recent,
            self.num_kept if "num_kept" in allowed else 0,
        )

    def _sizes(self, max_model_len: int) -> tuple[int, int, int]:
        """Return sinks, ring and kept entries; with all of them given, the capacity is their sum, otherwise what is left is shared out."""
        num_sink, num_recent, num_kept = self._given_sizes()
        if num_recent is not None and num_recent < self._least_recent:
            raise self._too_small(
                "num_recent", self._least_recent, num_recent, observation_window=self._observation_window
            )
        if num_recent is not None and num_kept is not None:
            if self.slot_capacity not in (None, self.least_capacity):
                sizes = f"num_sink {num_sink} + num_recent {num_recent} + num_kept {num_kept}"
                raise ValueError(
                    f"slot_capacity is {self.slot_capacity}, but {sizes} = {self.least_capacity}"
                )
            return num_sink, num_recent, num_kept
        capacity = self.slot_capacity
        if capacity is None:
            capacity = max_model_len if self.name is PolicyName.FULL else min(2048, max_model_len)
        if capacity < self.least_capacity:
            raise self._too_small(
                "slot_capacity",
                self.least_capacity,
                capacity if self.slot_capacity is not None else f"{capacity} by default",
                num_sink=num_sink or None,
                num_recent=self.num_recent,
                num_kept=self.num_kept,
                observation_window=self._observation_window,
            )
        rest = capacity - num_sink
        if num_recent is not None:
            return num_sink, num_recent, rest - num_recent
        num_kept = rest // 2 if num_kept is None else num_kept
        return num_sink, rest - num_kept, num_kept

    def _too_small(self, option: str, least: int, got: object, **others: int | None) -> ValueError:
        """Return the error that names the least value of an option, and the options that make it so."""
        named = ", ".join(f"{name} {value}" for name, value in others.items() if value is not None)
        return ValueError(
            f"{option} must be at least {least} for policy {self.name}{named and ' with '}{named}, got {got}"
        )


_SIZES_OF = {
    PolicyName.FULL: ("slot_capacity",),
    PolicyName.STREAMING_LLM: ("slot_capacity", "num_sink", "num_recent"),
    PolicyName.SNAPKV: ("slot_capacity", "num_recent", "num_kept"),
    PolicyName.SNAPSTREAM: ("slot_capacity", "num_sink", "num_recent", "num_kept"),
}

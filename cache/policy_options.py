"""A cache policy as users configure it, and the policy that follows for sequences of a given length."""

import enum
from dataclasses import dataclass

from cache.policy import CachePolicy, PolicyName, full, snapkv, snapstream, streaming_llm
from cache.scorer import Pooling, QueryReduction, SoftmaxDomain, WindowScorer


class LayerBudgets(enum.StrEnum):
    """How the kept entries of all layers are shared out between them."""

    EQUAL = "equal"
    MEASURED = "measured"  # by how much of each layer's attention looks things up, found out when the model is loaded


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

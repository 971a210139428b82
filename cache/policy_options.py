"""A cache policy as users configure it, and the policy that it becomes for sequences of a given length."""

import enum
from dataclasses import dataclass, replace

from cache.policy import (
    CachePolicy,
    PolicyName,
    full,
    held_window,
    snapkv,
    snapstream,
    sparse,
    streaming_llm,
)
from cache.scorer import Pooling, QueryReduction, SoftmaxDomain, WindowScorer

DEFAULT_CAPACITY = 2048
_DEFAULT_SINKS = 4
_SPARSE_RING = 124  # of `sparse`: with 4 sinks, whole vectors of entries
# `sparse` attends to a 32nd of what a slot may hold (arXiv 2604.08426), and to at least this many tokens.
_ATTENDED_SHARE = 32
_LEAST_ATTENDED = 128


class LayerBudgets(enum.StrEnum):
    """How the kept entries of all layers are shared out between them."""

    EQUAL = "equal"
    MEASURED = "measured"  # by each layer's induction score, measured when the model is first loaded


class SelectionName(enum.StrEnum):
    """A published or own way to choose the tokens that are kept."""

    DEFAULT = "default"  # the policy's own
    SNAPSTREAM = (
        "snapstream"  # SnapStream's recipe; its paper does not disclose the sizes, so we guessed them
    )
    SNAPKV = "snapkv"
    CHUNKKV = "chunkkv"  # arXiv 2502.00299


_SNAPKV = WindowScorer(softmax_domain=SoftmaxDomain.ALL)
_SCORERS = {
    SelectionName.SNAPSTREAM: WindowScorer(),
    SelectionName.SNAPKV: _SNAPKV,
    SelectionName.CHUNKKV: replace(_SNAPKV, selection_chunk=20),  # kvpress's default; the paper's is 10
}

# SnapKV's is as published. SnapStream's keeps each token to which a query of the window or of the question
# attends, and what follows it.
DEFAULT_SCORERS = {
    PolicyName.SNAPKV: _SNAPKV,
    PolicyName.SNAPSTREAM: WindowScorer(
        observation_window=256,
        observation_half_life=8,
        least_vote=1 / 8,
        softmax_domain=SoftmaxDomain.ALL,
        pooling=Pooling.MAXIMUM,
        pooling_size=61,
        pooling_shift=20,
        pooling_half_life=14,
        query_reduction=QueryReduction.MAXIMUM,
        num_echoed=64,
    ),
}


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """A size that is None follows from the others: 2,048 entries, 4 sinks, and halves of what is left.

    The default capacity of `full` and of `sparse` is the longest sequence's length. A backend that knows its
    memory may set that of `snapstream` by `with_default_capacity`.
    """

    name: PolicyName = PolicyName.SNAPSTREAM
    slot_capacity: int | None = None
    num_sink: int | None = None
    num_recent: int | None = None
    num_kept: int | None = None
    num_attended: int | None = None  # of `sparse`: tokens older than the ring that a step attends to
    scorer: WindowScorer | None = None  # None: the policy's own, in `DEFAULT_SCORERS`
    lend_kept: bool | None = None  # None: only `snapstream` lends them
    lend_ring: bool | None = None  # None: only `snapstream` lends it
    layer_budgets: LayerBudgets | None = None  # None: measured for `snapstream`, equal for the others
    share_votes: bool | None = None  # None: where layers are measured

    def with_selection(self, name: SelectionName) -> "PolicyOptions":
        """Return the options with this selection; unchanged for a policy that selects nothing.

        All but the default give each layer as many entries, and lend nothing of the ring.
        """
        if self.name not in DEFAULT_SCORERS:
            return self
        if name is SelectionName.DEFAULT:
            return replace(self, scorer=DEFAULT_SCORERS[self.name])
        return replace(self, scorer=_SCORERS[name], lend_ring=False, layer_budgets=LayerBudgets.EQUAL)

    @property
    def measures_layers(self) -> bool:
        """Whether the resolved policy needs its layers' scores."""
        has_choice = self.name is PolicyName.SNAPSTREAM and self.num_kept != 0
        return has_choice and self.layer_budgets is not LayerBudgets.EQUAL

    @property
    def has_default_capacity(self) -> bool:
        """Whether the policy is `snapstream` and none of its sizes is given."""
        sizes = (self.slot_capacity, self.num_sink, self.num_recent, self.num_kept)
        return self.name is PolicyName.SNAPSTREAM and all(size is None for size in sizes)

    def with_default_capacity(self, capacity: int, max_model_len: int) -> "PolicyOptions":
        """Return the options with this capacity if none of their sizes is given.

        A slot for the longest sequence is all ring and sinks: there is nothing to choose.
        """
        if not self.has_default_capacity:
            return self
        return replace(
            self, slot_capacity=capacity, num_kept=0 if capacity >= max_model_len else self.num_kept
        )

    @property
    def has_leading_layer(self) -> bool:
        """Whether layers also use the scores of the layer before them with the most induction."""
        return self.measures_layers and self.share_votes is not False

    @property
    def least_capacity(self) -> int:
        """The smallest capacity with which `resolve` finds room for the other options."""
        num_sink, num_recent, num_kept = self._given_sizes()
        if num_recent is None:
            num_recent = self._least_recent
            if num_kept is None:
                num_kept = (
                    num_recent - 1
                )  # ring and kept entries share the rest; the ring has the larger half
        return num_sink + num_recent + (num_kept or 0)

    def resolve(self, max_model_len: int) -> CachePolicy:
        """Return the policy for sequences of up to `max_model_len` tokens.

        Raises ValueError that names the option and its limit.
        """
        self._check_applicable()
        num_sink, num_recent, num_kept = self._sizes(max_model_len)
        if self.name is PolicyName.FULL:
            return full(min(num_recent, max_model_len))  # a longer slot would never be filled
        if self.name is PolicyName.STREAMING_LLM:
            return streaming_llm(num_sink, num_recent)
        if self.name is PolicyName.SPARSE:
            capacity = num_sink + num_recent + num_kept
            num_attended = self.num_attended or max(capacity // _ATTENDED_SHARE, _LEAST_ATTENDED)
            return sparse(num_sink, num_recent, num_kept, num_attended)
        scorer = self.scorer or DEFAULT_SCORERS[self.name]
        if self.name is PolicyName.SNAPSTREAM:
            lend_kept = self.lend_kept is not False
            lend_ring = self.lend_ring is not False
            return snapstream(
                num_sink, num_recent, num_kept, scorer, lend_kept=lend_kept, lend_ring=lend_ring
            )
        return snapkv(num_recent - scorer.observation_window, num_kept, scorer)

    def _check_applicable(self) -> None:
        allowed = _SIZES_OF[self.name]
        for option in ("slot_capacity", "num_sink", "num_recent", "num_kept"):
            if getattr(self, option) is not None and option not in allowed:
                raise ValueError(
                    f"{option} is not an option of policy {self.name}, whose sizes are {', '.join(allowed)}"
                )
        if self.num_attended is not None and self.name is not PolicyName.SPARSE:
            raise ValueError(f"num_attended is not an option of policy {self.name}")
        if self.num_attended is not None and self.num_attended < 1:
            raise ValueError(f"num_attended must be at least 1, got {self.num_attended}")
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
    def _limiting_window(self) -> int | None:
        """The observation window where it sets the least size of the ring."""
        scorer = self.scorer or DEFAULT_SCORERS.get(self.name)
        if scorer is None:
            return None
        window = scorer.observation_window
        return window if self.name is PolicyName.SNAPKV or window == held_window(scorer) else None

    @property
    def _least_recent(self) -> int:
        """The smallest ring: a prompt's last tokens; for snapkv, which never evicts, one more."""
        scorer = self.scorer or DEFAULT_SCORERS.get(self.name)
        if scorer is None:
            return 1
        if self.name is PolicyName.SNAPKV:
            return scorer.observation_window + 1
        return held_window(scorer)

    def _given_sizes(self) -> tuple[int, int | None, int | None]:
        """Return sinks, ring and kept entries, or stored tokens; None for what follows from the capacity."""
        allowed = _SIZES_OF[self.name]
        num_sink = _DEFAULT_SINKS if self.num_sink is None else self.num_sink
        return (
            num_sink if "num_sink" in allowed else 0,
            self.num_recent,
            self.num_kept if "num_kept" in allowed else None if self.name is PolicyName.SPARSE else 0,
        )

    def _sizes(self, max_model_len: int) -> tuple[int, int, int]:
        """Return sinks, ring and kept entries, or stored tokens.

        With all of them given, the capacity must be their sum.
        """
        num_sink, num_recent, num_kept = self._given_sizes()
        if num_recent is not None and num_recent < self._least_recent:
            raise self._too_small(
                "num_recent", self._least_recent, num_recent, observation_window=self._limiting_window
            )
        if num_recent is not None and num_kept is not None:
            if self.slot_capacity not in (None, self.least_capacity):
                sizes = f"num_sink {num_sink} + num_recent {num_recent} + num_kept {num_kept}"
                raise ValueError(
                    f"slot_capacity is {self.slot_capacity}, but {sizes} = {self.least_capacity}"
                )
            return num_sink, num_recent, num_kept
        rest = self._capacity(max_model_len) - num_sink
        if self.name is PolicyName.SPARSE:
            num_recent = num_recent or min(_SPARSE_RING, rest)
            # A store for more would never be filled.
            return num_sink, num_recent, max(min(rest, max_model_len - num_sink) - num_recent, 0)
        if num_recent is not None:
            return num_sink, num_recent, rest - num_recent
        num_kept = rest // 2 if num_kept is None else num_kept
        return num_sink, rest - num_kept, num_kept

    def _capacity(self, max_model_len: int) -> int:
        """Return the capacity, or its default. Raises ValueError if the given sizes do not fit it."""
        capacity = self.slot_capacity
        if capacity is None:
            holds_all = self.name in (PolicyName.FULL, PolicyName.SPARSE)
            capacity = max_model_len if holds_all else min(DEFAULT_CAPACITY, max_model_len)
        if capacity >= self.least_capacity:
            return capacity
        num_sink, _, _ = self._given_sizes()
        raise self._too_small(
            "slot_capacity",
            self.least_capacity,
            capacity if self.slot_capacity is not None else f"{capacity} by default",
            num_sink=num_sink or None,
            num_recent=self.num_recent,
            num_kept=self.num_kept,
            observation_window=self._limiting_window,
        )

    def _too_small(self, option: str, least: int, got: object, **others: int | None) -> ValueError:
        """Return the error that names the least value of an option, and the options that require it."""
        named = ", ".join(f"{name} {value}" for name, value in others.items() if value is not None)
        reason = f" with {named}" if named else ""
        return ValueError(f"{option} must be at least {least} for policy {self.name}{reason}, got {got}")


_SIZES_OF = {
    PolicyName.FULL: ("slot_capacity",),
    PolicyName.STREAMING_LLM: ("slot_capacity", "num_sink", "num_recent"),
    PolicyName.SNAPKV: ("slot_capacity", "num_recent", "num_kept"),
    PolicyName.SNAPSTREAM: ("slot_capacity", "num_sink", "num_recent", "num_kept"),
    PolicyName.SPARSE: ("slot_capacity", "num_sink", "num_recent"),
}

"""The cache that a transformers model writes to and attends over: slots, and scratches for the prompts that are longer than a slot.

A `Step` says where one forward pass writes and reads. It is built by `prefill` and `decode`; nothing is decided here, and layers that hold
their tokens by the same policy share one entry of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.torch_backend.model.attention import AttentionOptions, grouped_attention
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.native.kernels import Kernels, observed_attention, prompt_attention, takes_prompt
from cache.policy import CachePolicy
from cache.scorer import WindowScorer
from cache.scoring import Reduction, candidate_scores, join_votes, reduced_attention, select, window_votes
from cache.slots import SlotCache


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that hold their tokens alike. `sliding_window` is the model's, None where a query sees everything."""

    policy: CachePolicy
    sliding_window: int | None

    @property
    def chooser(self) -> WindowScorer | None:
        """The scorer, where there is something to choose."""
        return self.policy.scorer if self.policy.layout.num_kept > 0 else None


@dataclass(frozen=True, slots=True)
class KindStep:
    """A forward pass as the layers of one kind see it."""

    entries: Tensor  # [row, token]: where each token is written
    bias: Tensor  # float32 [row, query, entry]: 0 where a query sees an entry, `HIDDEN` where not; of the last of the entries read
    num_open: int = 0  # entries before them, which every query sees
    # [row, query], where entries are in the order of the sequence: the last one that each query sees, −1 for padding. The last one read is
    # the last query's own.
    last_seen: Tensor | None = None

    @property
    def read_length(self) -> int:
        return self.num_open + self.bias.shape[2]

    def of_last(self, num_tokens: int) -> "KindStep":
        """Return it as each row's last tokens see it."""
        last_seen = None if self.last_seen is None else self.last_seen[:, -num_tokens:].contiguous()
        return KindStep(self.entries[:, -num_tokens:], self.bias[:, -num_tokens:], self.num_open, last_seen)


@dataclass(frozen=True, slots=True)
class Observation:
    """A row whose queries vote on which tokens of its prompt are kept.

    Of the scratch's first `num_held` entries, the sinks and the newest are kept anyway; the last queries before `end` vote on the others.
    """

    row: int
    scratch: int
    num_held: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward pass writes and reads."""

    places: Tensor  # [row]: slots, or scratches
    kinds: tuple[KindStep, ...]
    into_scratch: bool = False
    reads_first: bool = False  # `places` are the first ones, in order
    only_place: int | None = None  # of a single row, which is read where it lies
    query_entry: Tensor | None = (
        None  # [row, query]: the tokens' entries in their scratches, −1 for padding; only for observations
    )
    observations: tuple[Observation, ...] = ()
    num_asked: int | None = (
        None  # of each row's tokens, the last so many are asked for beyond the cache and the votes; None: all
    )
    only_writes: bool = False  # whoever has written to the cache is done

    def of_last(self, num_tokens: int) -> "Step":
        """Return the step as each row's last tokens see it: what they write and what they vote is the same."""
        kinds = tuple(kind.of_last(num_tokens) for kind in self.kinds)
        return replace(
            self,
            kinds=kinds,
            query_entry=None if self.query_entry is None else self.query_entry[:, -num_tokens:],
        )


class WrittenError(Exception):
    """A layer has written to the cache, and the step asks for no more."""


class CacheLayer(CacheLayerMixin):
    """One layer's slots, the scratches that they are filled from, and who is voted for there."""

    def __init__(
        self,
        spec: LayerSpec,
        kind_index: int,
        kind: LayerKind,
        num_slots: int,
        scratch: SlotCache,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind_index = kind_index
        self.kind = kind
        self.slots = SlotCache(kind.policy.layout, num_slots, spec.num_kv_heads, spec.planes, device)
        self.scratch = scratch
        self.leader: CacheLayer | None = None  # whose votes count here too
        num_votes = scratch.layout.capacity if kind.chooser else 0
        self._votes = torch.zeros(scratch.num_slots, spec.num_heads, num_votes, device=device)
        # The index of the token that each entry of a scratch holds.
        self._index = torch.zeros(
            scratch.num_slots, spec.num_kv_heads, num_votes, dtype=torch.int64, device=device
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, step: Step, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values and return those that its queries may see."""
        keys, values = self.write(step, key_states, value_states)
        return keys, values

    def write(self, step: Step, *values: Tensor) -> list[Tensor]:
        """Write what a step has for each plane, [row, kv_head, token, width], and return what its queries may see of each.

        Raises WrittenError if nobody asks for that.
        """
        cache = self.scratch if step.into_scratch else self.slots
        kind = step.kinds[self.kind_index]
        cache.write(step.places, kind.entries, values)
        if step.only_writes:
            raise WrittenError
        first = 0 if step.reads_first else step.only_place
        read = step.places if first is None else slice(first, first + step.places.shape[0])
        return [plane[:, :, : kind.read_length][read] for plane in cache.planes]

    def observe(
        self, step: Step, query: Tensor, key: Tensor, options: AttentionOptions, reduction: Reduction
    ) -> None:
        """Gather the votes of the observation windows' queries."""
        scorer = self.kind.chooser
        if scorer is None or step.query_entry is None:
            return
        policy = self.kind.policy
        for seen in step.observations:
            votes = window_votes(
                scorer,
                query[seen.row],
                key[seen.row],
                step.query_entry[seen.row],
                scale=options.scaling,
                num_sink=policy.layout.num_sink,
                candidates_end=policy.place(seen.num_held).candidates_end,
                num_prompt_tokens=seen.end,
                softcap=options.softcap,
                reduction=reduction,
            )
            join_votes(scorer, self._votes[seen.scratch, :, : votes.shape[1]], votes)

    @property
    def num_bytes(self) -> int:
        return self.slots.num_bytes + self.scratch.num_bytes + self._votes.nbytes + self._index.nbytes

    def clear_slot(self, slot: int) -> None:
        """Forget a slot's last sequence: should it have held NaN or infinity, the next one would meet them at a weight of zero."""
        _clear(self.slots, slot)

    def clear_scratch(self, scratch: int) -> None:
        _clear(self.scratch, scratch)
        self._votes[scratch].zero_()
        self._index[scratch] = torch.arange(self._index.shape[2], device=self._index.device)

    def shrink(self, scratch: int, num_held: int, num_dropped: int, num_read: int) -> None:
        """Give up `num_dropped` of a scratch's first `num_held` entries: those that were voted for least, or the oldest; sinks never.

        `num_read` of the prompt's tokens have been read.
        """
        num_sink, num_left = self.kind.policy.layout.num_sink, num_held - num_dropped
        end = self.kind.policy.place(num_held).candidates_end
        best = self._best(scratch, end, end - num_sink - num_dropped)
        entry = torch.arange(num_held, device=self._index.device).expand(self._index.shape[1], -1)
        if best is None:
            best, end = entry[:, :0], num_sink + num_dropped
        left = torch.cat([entry[:, :num_sink], best, entry[:, end:]], dim=1)
        for plane in self.scratch.planes:
            heads, entries, width = plane.shape[1:]
            rows = (left + entries * torch.arange(heads, device=left.device)[:, None]).flatten()
            plane[scratch, :, :num_left] = (
                plane[scratch].flatten(0, 1).index_select(0, rows).view(heads, num_left, width)
            )
        if self.kind.chooser is not None:
            index = self._index[scratch]
            index[:, :num_left] = index.gather(1, left)
            index[:, num_left:] = torch.arange(
                num_read, num_read + index.shape[1] - num_left, device=index.device
            )
        self._votes[scratch].zero_()

    def pack(self, scratch: int, slots: Sequence[int], num_prompt_tokens: int, num_given_up: int) -> None:
        """Choose the tokens of a prompt that was read in `scratch`, which gave up some of them, and put them into `slots`."""
        policy = self.kind.policy
        placement = policy.place(num_prompt_tokens)
        # Each layer gave up others, so that entries of two no longer stand for the same tokens.
        leader = self.leader if num_given_up == 0 else None
        kept = self._best(
            scratch,
            placement.candidates_end - num_given_up,
            policy.layout.num_kept,
            placement.num_lent,
            leader,
        )
        self.clear_slot(slots[0])
        self.slots.pack(
            slots[0],
            [plane[scratch] for plane in self.scratch.planes],
            placement,
            num_prompt_tokens,
            kept,
            num_given_up,
        )
        if kept is not None:
            own = kept[:, : placement.num_kept_used]
            self.slots.kept_index[slots[0], :, : own.shape[1]] = self._index[scratch].gather(1, own)
        self.slots.copy(slots[0], slots[1:])

    def _best(
        self, scratch: int, end: int, num_best: int, num_lent: int = 0, leader: "CacheLayer | None" = None
    ) -> Tensor | None:
        """Return the entries [kv_head, entry] of the candidates before `end` that `select` chooses; None where nobody votes."""
        scorer = self.kind.chooser
        if scorer is None:
            return None
        num_kv_heads, num_sink = self.slots.kept_index.shape[1], self.kind.policy.layout.num_sink
        others = (
            leader.highest_scores(scratch, end) if leader is not None and end - num_sink > num_best else None
        )
        return select(scorer, self._votes[scratch], num_kv_heads, num_sink, end, num_best, num_lent, others)

    def highest_scores(self, scratch: int, end: int) -> Tensor | None:
        """Return the highest score that each candidate before `end` has with any KV head; None where nobody votes."""
        scorer = self.kind.chooser
        if scorer is None:
            return None
        num_kv_heads, num_sink = self.slots.kept_index.shape[1], self.kind.policy.layout.num_sink
        return candidate_scores(scorer, self._votes[scratch], num_kv_heads, num_sink, end).amax(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Everything is allocated from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask of the model's is ever built."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """There is no one length: slots differ, and positions come with each step."""
        return 0

    def get_max_length(self) -> int:
        return -1


def _clear(cache: SlotCache, place: int) -> None:
    for plane in cache.planes:
        plane[place].zero_()


class ModelCache(Cache):
    """All layers. `step` is the forward pass under way."""

    layers: list[CacheLayer]  # type: ignore[assignment]

    def __init__(self, layers: Sequence[CacheLayer], kernels: Kernels) -> None:
        super().__init__(layers=list(layers))
        self.step: Step | None = None
        self._kernels = kernels

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        assert self.step is not None, "a forward pass has a step"
        return self.layers[layer_idx].update(key_states, value_states, self.step)

    def store(self, layer: int, latents: Tensor) -> Tensor:
        """Write a step's latents to a layer that holds them instead of keys and values, and return those that its queries may see."""
        assert self.step is not None, "a forward pass has a step"
        return self.layers[layer].write(self.step, latents)[0]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention of a step's queries, and let the observation windows among them vote."""
        step, own = self.step, self.layers[layer]
        assert step is not None, "a forward pass has a step"
        is_fast = self._kernels.are_used and takes_prompt(query)
        if step.observations:
            own.observe(step, query, key, options, observed_attention if is_fast else reduced_attention)
        kind = step.kinds[own.kind_index]
        scaling, softcap, sinks = options.scaling, options.softcap, options.sinks
        if kind.last_seen is None:
            return grouped_attention(
                query, key, value, kind.bias, scaling=scaling, softcap=softcap, sinks=sinks
            )
        if is_fast:
            window = own.kind.sliding_window
            return prompt_attention(
                query, key, value, kind.last_seen, window, scaling=scaling, softcap=softcap, sinks=sinks
            )
        return grouped_attention(
            query, key, value, kind.bias, scaling=scaling, softcap=softcap, sinks=sinks, is_causal=True
        )

"""The cache that a transformers model writes to and attends over: slots, and scratches for long prompts.

A `Step` of `forward.step` describes where one forward pass writes and reads; `forward.plan` builds it. The
only decision made here, by `cache.scoring`, is which tokens of a long prompt are kept or evicted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.torch_backend.forward.step import (
    DecodeStep,
    KindStep,
    LayerKind,
    Observation,
    PromptStep,
    ScratchStep,
    Step,
)
from backends.torch_backend.model import fused_attention
from backends.torch_backend.model.attention import AttentionOptions, grouped_attention
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.model.recurrent import Mix, RowStates, mix_live_rows
from backends.torch_backend.model.sparse_attention import StoredTokens, sparse_attention
from backends.torch_backend.native.kernels import Kernels, observed_attention, prompt_attention, takes_prompt
from backends.torch_backend.torch_private import onednn
from cache.pool_options import KVCacheDtype
from cache.scoring import Reduction, candidate_scores, join_votes, reduced_attention, select, window_votes
from cache.slots import SlotCache


class LayerStoppedError(Exception):
    """Leaves a layer after its cache write. Not a failure: `ModelCache.stopping_after_write` expects it."""


class CacheLayer(CacheLayerMixin):
    """One layer's slots, the scratches from which they are filled, and the votes on the scratches' tokens."""

    def __init__(
        self,
        spec: LayerSpec,
        kind_index: int,
        kind: LayerKind,
        num_slots: int,
        scratch: SlotCache,
        device: torch.device,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind_index = kind_index
        self.kind = kind
        self.slots = SlotCache(
            kind.policy.layout,
            num_slots,
            spec.num_kv_heads,
            spec.planes,
            device,
            kv_cache_dtype=kv_cache_dtype,
            store=kind.policy.store,
            states=spec.states,
        )
        self.scratch = scratch
        self.leader: CacheLayer | None = None  # an earlier layer, whose scores count here too
        num_votes = scratch.layout.capacity if kind.scorer and self.holds_entries else 0
        self._votes = torch.zeros(scratch.num_slots, spec.num_heads, num_votes, device=device)
        # [scratch, kv_head, entry]: the index of the token in each entry. Heads differ after an eviction.
        self._token_index = torch.zeros(
            scratch.num_slots, spec.num_kv_heads, num_votes, dtype=torch.int64, device=device
        )

    @property
    def num_bytes(self) -> int:
        return self.slots.num_bytes + self.scratch.num_bytes + self._votes.nbytes + self._token_index.nbytes

    @property
    def holds_entries(self) -> bool:
        """Whether the layer attends, and holds keys and values or latents. Others have states or nothing."""
        return bool(self.slots.planes)

    @property
    def num_kv_heads(self) -> int:
        return self.slots.kept_index.shape[1]

    def of_step(self, step: Step) -> KindStep:
        """Return a step as this layer sees it."""
        return step.kinds[self.kind_index]

    def write(self, step: Step, *values: Tensor) -> None:
        """Write a step's tokens: for each plane, [row, kv_head, token, width]."""
        kind_step = self.of_step(step)
        if kind_step.num_stored is not None:
            self._demote(step.rows, kind_step.entries[:, 0], kind_step.num_stored)
        self._target(step).write(step.rows, kind_step.entries, values)

    def _demote(self, slots: Tensor, entries: Tensor, num_stored: Tensor) -> None:
        """Store the tokens that a decode step overwrites, if there are any. All arguments are [row]."""
        store = self.slots.store
        assert store is not None, "a step with stored tokens is one of a policy with a store"
        has_any = num_stored > 0
        self.slots.demote(slots, entries, torch.where(has_any, num_stored - 1, store.spare_entry))

    def read(self, step: Step) -> list[Tensor]:
        """Return the part of each plane that a step's queries may see, [row, kv_head, entry, width]."""
        rows = step.rows if step.view is None else step.view
        return self._target(step).read(rows, self.of_step(step).read_length)

    def _target(self, step: Step) -> SlotCache:
        return self.scratch if isinstance(step, ScratchStep) else self.slots

    def mix(self, step: Step, mixer: Mix, hidden: Tensor) -> Tensor:
        """Return the output of the layer's mixer for a step's tokens [row, token, width].

        The states advance by these tokens. Each row of a prompt is run alone, without its padding, which
        would come between its state and its tokens.
        """
        if isinstance(step, DecodeStep):
            return mix_live_rows(mixer, hidden, self.slots.states, step.is_live)
        assert isinstance(step, PromptStep), "a step is of a prompt or of decode"
        held = self._target(step).states
        advances = not isinstance(step, ScratchStep) or step.advances_states
        output = torch.zeros_like(hidden)
        for row, chunk in enumerate(step.chunks):
            tokens = slice(-chunk.num_tokens, None)
            states = RowStates(*(state[chunk.target, None].clone() for state in held))
            output[row, tokens] = mixer(hidden[row, None, tokens], states)[0]
            if advances:
                for old, new in zip(held, states.tensors, strict=True):
                    old[chunk.target] = new[0]
        return output

    def observe(
        self,
        step: ScratchStep,
        query: Tensor,
        key: Tensor,
        options: AttentionOptions,
        reduction: Reduction,
    ) -> None:
        """Accumulate the votes of the observation windows' queries."""
        if self.kind.scorer is None:
            return
        for observation in step.observations:
            self._observe_row(observation, step, query, key, options, reduction)

    def _observe_row(
        self,
        observation: Observation,
        step: ScratchStep,
        query: Tensor,
        key: Tensor,
        options: AttentionOptions,
        reduction: Reduction,
    ) -> None:
        scorer = self.kind.scorer
        policy = self.kind.policy
        assert scorer is not None, "votes are for a scorer"
        row = observation.row
        candidates_end = policy.place(observation.num_held).candidates_end
        votes = window_votes(
            scorer,
            query[row],
            key[row],
            step.query_entry[row],
            scale=options.scaling,
            num_sink=policy.layout.num_sink,
            candidates_end=observation.num_held if observation.scores_all else candidates_end,
            num_prompt_tokens=observation.end,
            softcap=options.softcap,
            num_observing=observation.num_queries,
            num_echoed=observation.num_echoed,
            echo_weight=observation.echo_weight,
            reduction=reduction,
        )
        join_votes(scorer, self._votes[observation.scratch, :, : votes.shape[1]], votes)

    def clear_slot(self, slot: int, start: int = 0, end: int | None = None) -> None:
        """Overwrite a slot with zeros: of its planes, the entries from `start` to `end`."""
        self.slots.clear(slot, start, end)

    def clear_scratch(self, scratch: int, start: int = 0) -> None:
        """Overwrite a scratch, from entry `start` on, with zeros, and forget the votes on its tokens."""
        self.scratch.clear(scratch, start)
        self.forget_votes(scratch)
        self._token_index[scratch] = torch.arange(self._token_index.shape[2], device=self._token_index.device)

    def votes(self, scratch: int, num_tokens: int) -> Tensor | None:
        """Return the votes on a scratch's first tokens, [head, token]; None without a scorer or entries."""
        has_votes = self.kind.scorer is not None and self.holds_entries
        return self._votes[scratch, :, :num_tokens] if has_votes else None

    def forget_votes(self, scratch: int) -> None:
        """Forget the votes on a scratch's tokens."""
        self._votes[scratch].zero_()

    def evict(self, scratch: int, num_held: int, num_evicted: int, num_read: int) -> None:
        """Evict `num_evicted` of a full scratch's `num_held` tokens; the others close up, in their order.

        Evicted are the candidates with the lowest scores or, without a scorer, the oldest. Sinks stay, and so
        do the newest tokens. `num_read` of the prompt's tokens have been read so far.
        """
        if not self.holds_entries:
            return
        num_sink = self.kind.policy.layout.num_sink
        num_left = num_held - num_evicted
        device = self._token_index.device
        candidates_end = self.kind.policy.place(num_held).candidates_end
        kept = self._select(scratch, candidates_end, candidates_end - num_sink - num_evicted)
        entry = torch.arange(num_held, device=device).expand(self.num_kv_heads, -1)
        if kept is None:
            kept = entry[:, :0]
            candidates_end = num_sink + num_evicted
        survivors = torch.cat([entry[:, :num_sink], kept, entry[:, candidates_end:]], dim=1)
        for plane in self.scratch.planes:
            # Heads keep different entries. With the head folded into the entry, one index_select moves all of
            # them; it copies first, so that no entry is overwritten before it is read.
            heads, entries, width = plane.shape[1:]
            folded = (survivors + entries * torch.arange(heads, device=device)[:, None]).flatten()
            moved = plane[scratch].flatten(0, 1).index_select(0, folded)
            plane[scratch, :, :num_left] = moved.view(heads, num_left, width)
        if self.kind.scorer is not None:
            index = self._token_index[scratch]
            index[:, :num_left] = index.gather(1, survivors)
            # The entries behind them are filled by the tokens that are read next.
            index[:, num_left:] = torch.arange(num_read, num_read + index.shape[1] - num_left, device=device)
        self._votes[scratch].zero_()

    def pack(
        self, scratch: int, slots: Sequence[int], num_prompt_tokens: int, num_evicted: int
    ) -> Tensor | None:
        """Choose the tokens to keep of a prompt that was read in `scratch`, and fill `slots` with them.

        `num_evicted` of the prompt's tokens were evicted from the scratch. Returns the indices of the tokens
        that each head has chosen, [kv_head, token]; None where there was no choice. States are of the whole
        prompt, for every choice.
        """
        self.clear_slot(slots[0])
        for of_slots, of_scratches in zip(self.slots.states, self.scratch.states, strict=True):
            of_slots[slots[0]] = of_scratches[scratch]
        chosen = None
        if self.holds_entries:
            chosen = self._pack_entries(scratch, slots[0], num_prompt_tokens, num_evicted)
        self.slots.copy(slots[0], slots[1:])
        return chosen

    def _pack_entries(
        self, scratch: int, slot: int, num_prompt_tokens: int, num_evicted: int
    ) -> Tensor | None:
        policy = self.kind.policy
        placement = policy.place(num_prompt_tokens)
        # Layers evict different tokens, after which entries of two layers no longer hold the same token.
        leader = self.leader if num_evicted == 0 else None
        kept = self._select(
            scratch,
            placement.candidates_end - num_evicted,
            policy.layout.num_kept,
            placement.num_lent,
            leader,
        )
        sources = [plane[scratch] for plane in self.scratch.planes]
        self.slots.pack(slot, sources, placement, num_prompt_tokens, kept, num_evicted)
        if kept is None:
            return None
        chosen = self._token_index[scratch].gather(1, kept)
        num_used = placement.num_kept_used
        self.slots.kept_index[slot, :, :num_used] = chosen[:, :num_used]
        return chosen

    def held(self, num_prompt_tokens: int, chosen: Tensor | None) -> Tensor:
        """Return which tokens of a packed prompt the slot holds: bool [kv_head, token].

        `chosen` is what `pack` returned.
        """
        placement = self.kind.policy.place(num_prompt_tokens)
        num_sink = placement.layout.num_sink
        held = torch.zeros(
            self.num_kv_heads, num_prompt_tokens, dtype=torch.bool, device=self.slots.kept_index.device
        )
        held[:, :num_sink] = True
        held[:, placement.candidates_end :] = True
        if chosen is not None:
            held.scatter_(1, chosen, True)
        elif (
            self.kind.policy.store is not None or placement.num_kept_used == placement.window_start - num_sink
        ):
            held[:] = True
        return held

    def _select(
        self,
        scratch: int,
        candidates_end: int,
        num_kept: int,
        num_lent: int = 0,
        leader: "CacheLayer | None" = None,
    ) -> Tensor | None:
        """Return the entries [kv_head, entry] that `select` chooses; None without a scorer."""
        scorer = self.kind.scorer
        if scorer is None:
            return None
        num_sink = self.kind.policy.layout.num_sink
        leader_scores = None
        if leader is not None and candidates_end - num_sink > num_kept:
            leader_scores = leader.best_scores(scratch, candidates_end)
        return select(
            scorer,
            self._votes[scratch],
            self.num_kv_heads,
            num_sink,
            candidates_end,
            num_kept,
            num_lent,
            leader_scores,
        )

    def best_scores(self, scratch: int, candidates_end: int) -> Tensor | None:
        """Return each candidate's highest score over all KV heads, [candidate]; None without a scorer."""
        scorer = self.kind.scorer
        if scorer is None:
            return None
        num_sink = self.kind.policy.layout.num_sink
        scores = candidate_scores(scorer, self._votes[scratch], self.num_kv_heads, num_sink, candidates_end)
        return scores.amax(0)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> NoReturn:
        """Never called: `ModelCache.update` writes with the step that is under way."""
        raise NotImplementedError("a layer is written by its ModelCache")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: all planes are allocated when the layer is made."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return a size for the model's mask, which is never built."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: slots have different lengths, and each step brings its positions."""
        return 0

    def get_max_length(self) -> int:
        return -1


class ModelCache(Cache):
    """All layers of a pool but those at the end that store nothing.

    The cache is the only object of this backend that a transformers model passes to its layers. The step that
    is under way is therefore an attribute of it. `ForwardPass.arguments` sets it, and the attention reads it.
    """

    CALLED_BY_LAYERS: ClassVar = ("update", "store", "mix", "attend")

    layers: list[CacheLayer]  # type: ignore[assignment]

    def __init__(
        self, layers: Sequence[CacheLayer], kernels: Kernels, sources: Mapping[int, int] | None = None
    ) -> None:
        """`sources` has the layers that store nothing, and for each the one to whose entries it attends."""
        super().__init__(layers=list(layers))
        self._sources = sources or {}
        self.step: Step | None = None
        self._kernels = kernels
        self._stops_after_write = False

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def shares_entries(self) -> bool:
        """Whether some layers store nothing, and attend to what earlier ones store."""
        return bool(self._sources)

    @property
    def current_step(self) -> Step:
        assert self.step is not None, "a forward pass has a step"
        return self.step

    @contextmanager
    def during(self, step: Step) -> Iterator[None]:
        """Replace the step that is under way for a time."""
        previous = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = previous

    @contextmanager
    def stopping_after_write(self) -> Iterator[None]:
        """Run a layer only as far as its cache write.

        What comes before the write is the model's own code, and so is what follows. The only way to run one
        without the other is an exception from between the two, which ends here.
        """
        self._stops_after_write = True
        try:
            yield
        except LayerStoppedError:
            pass
        finally:
            self._stops_after_write = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values, and return those that its queries may see."""
        keys, values = self._write_and_read(layer_idx, key_states, value_states)
        return keys, values

    def store(self, layer: int, latents: Tensor) -> Tensor:
        """Write a step's latents to a layer, and return those that its queries may see."""
        return self._write_and_read(layer, latents)[0]

    def mix(self, layer: int, mixer: Mix, hidden: Tensor) -> Tensor:
        """Return the output of a layer's mixer for a step's tokens [row, token, width]."""
        return self.layers[layer].mix(self.current_step, mixer, hidden)

    def _write_and_read(self, layer: int, *values: Tensor) -> list[Tensor]:
        self.layers[layer].write(self.current_step, *values)
        if self._stops_after_write:
            raise LayerStoppedError
        return self.layers[layer].read(self.current_step)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention of a step's queries. The observing queries among them vote."""
        step = self.current_step
        cache_layer = self.layers[self._sources.get(layer, layer)]
        kind = cache_layer.of_step(step)
        has_kernels = self._kernels.are_used and takes_prompt(query)
        # The kernel masks by the entry of each query's token. So entries must be in the sequence's order, and
        # each query must see all of them before its own.
        uses_kernel = has_kernels and kind.last_seen is not None and options.ranks is None
        if not uses_kernel and onednn.is_slow(query):
            output = self.attend(layer, query.float(), key.float(), value.float(), options)
            return output.to(query.dtype)
        # Of the layers that attend to the same entries, the one that stores them chooses what is kept.
        if isinstance(step, ScratchStep) and step.observations and layer not in self._sources:
            reduction = observed_attention if has_kernels else reduced_attention
            cache_layer.observe(step, query, key, options, reduction)
        if query.shape[2] < kind.bias.shape[1]:
            # Layers that store nothing may be run for the last tokens alone.
            kind = kind.of_last(query.shape[2])
        if options.ranks is not None:
            kind = kind.of_best(options.ranks, options.num_best)
            return grouped_attention(query, key, value, kind.bias, scaling=options.scaling)
        store = cache_layer.kind.policy.store
        if kind.num_stored is not None and store is not None and cache_layer.slots.store is not None:
            assert step.view is not None, "a decode step reads neighbouring slots"
            return sparse_attention(
                query,
                key,
                value,
                kind.bias,
                StoredTokens(cache_layer.slots.store, step.view, kind.num_stored, store.num_attended),
                options,
            )
        if uses_kernel:
            assert kind.last_seen is not None, "its entries are in order"
            return prompt_attention(
                query,
                key,
                value,
                kind.last_seen,
                cache_layer.kind.sliding_window,
                scaling=options.scaling,
                softcap=options.softcap,
                sinks=options.sinks,
            )
        has_window = cache_layer.kind.sliding_window is not None
        return _plain_attention(query, key, value, kind, options, has_window=has_window)


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, kind: KindStep, options: AttentionOptions, *, has_window: bool
) -> Tensor:
    """Return the attention by torch's operators, by a fused one where it fits."""
    is_causal = kind.last_seen is not None
    if is_causal and not has_window and fused_attention.fits_prompt(query, key, value, options):
        return fused_attention.prompt_attention(query, key, value, options)
    if not is_causal and fused_attention.fits_decode(query, key, value, kind.bias):
        return fused_attention.decode_attention(query, key, value, kind.bias, options)
    return grouped_attention(
        query,
        key,
        value,
        kind.bias,
        scaling=options.scaling,
        softcap=options.softcap,
        sinks=options.sinks,
        is_causal=is_causal,
    )

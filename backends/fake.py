"""A backend without a model and without torch: deterministic tokens, checked batches, time by a formula.

Every token is a function of its slot's content (`backends.fake_model`), so a wrong slot or a missing chunk
changes the tokens. It can have any spec, but it evicts nothing: sequences are exact with every policy. An
invalid batch is an error of the scheduler and raises AssertionError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.clock import Clock, VirtualClock
from backends.fake_model import choose, fold, hidden_state, importance, with_logprobs
from backends.interface import (
    BackendError,
    BackendSpec,
    Batch,
    BatchResult,
    CodeState,
    DecodeBatch,
    DecodeRow,
    Draw,
    Feature,
    KeptTokens,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    PrefixArchive,
    PrefixSpec,
    PromptPooling,
    SampledToken,
    ScratchSpec,
    SlotPoolSpec,
    SlotStore,
    StoredBlock,
)
from cache.policy import CachePolicy, full
from cache.scratch import ScratchLayout


def slot_pool(
    num_slots: int,
    policy: CachePolicy,
    max_model_len: int,
    name: str | None = None,
    *,
    max_draft_tokens: int = 0,
) -> SlotPoolSpec:
    """Return a pool's spec. The default name is the policy's."""
    max_direct = min(policy.max_direct_tokens, max_model_len)
    name = name or policy.name
    return SlotPoolSpec(num_slots, policy, max_direct, max_model_len, name, max_draft_tokens=max_draft_tokens)


def fake_spec(
    *,
    num_slots: int = 8,
    max_model_len: int = 4096,
    policy: CachePolicy | None = None,
    pools: Sequence[SlotPoolSpec] = (),
    num_scratch: int = 2,
    scratch: ScratchLayout | None = None,
    prefill_shapes: Sequence[PrefillShape] = (PrefillShape(1, 64), PrefillShape(4, 64), PrefillShape(1, 256)),
    vocab_size: int = 512,
    max_decode_steps: int = 4,
    features: frozenset[Feature] = frozenset(Feature),
    embedding_size: int = 8,
    prefixes: PrefixSpec | None = None,
) -> BackendSpec:
    """Return a spec for the fake backend, with these pools or one of `policy`, by default `full`."""
    policy = policy if policy is not None else full(max_model_len)
    return BackendSpec(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        pools=tuple(pools) or (slot_pool(num_slots, policy, max_model_len),),
        scratch=ScratchSpec(num_scratch, scratch or ScratchLayout(max_model_len)),
        prefill_shapes=tuple(sorted(prefill_shapes, key=lambda shape: (shape.num_tokens, shape.num_rows))),
        features=features,
        max_decode_steps=max_decode_steps,
        embedding_size=embedding_size,
        prefixes=prefixes,
    )


@dataclass(slots=True)
class _Contents:
    """The contents of a slot or a scratch."""

    num_prompt_tokens: int
    num_forced: int = 0  # tokens of the prompt that decode read
    state: int = 0
    token_ids: list[int] = field(default_factory=list)

    def write(self, token_ids: Sequence[int]) -> None:
        self.state = fold(self.state, token_ids)
        self.token_ids += token_ids

    def copy(self) -> "_Contents":
        return _Contents(self.num_prompt_tokens, self.num_forced, self.state, self.token_ids.copy())

    def sample(self, draw: Draw, vocab_size: int) -> SampledToken:
        """Draw the token that follows."""
        if draw.forced_token_ids:
            token_id = draw.forced_token_ids[0]
            self.num_forced += 1
        else:
            token_id = choose(
                self.state, draw, vocab_size, self.token_ids, self.num_prompt_tokens + self.num_forced
            )
        num_logprobs = draw.num_logprobs(0)
        if num_logprobs is None:
            return SampledToken(token_id)
        return with_logprobs(self.state, token_id, num_logprobs, vocab_size, draw.logprob_token_ids(0))


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has ended, with its result or error."""

    outcome: BatchResult | BackendError

    def result(self) -> BatchResult:
        if isinstance(self.outcome, BackendError):
            raise self.outcome
        return self.outcome


def _kept_tokens(row: PrefillRow, policy: CachePolicy) -> KeptTokens:
    """Return which tokens a slot of the policy would hold whose only head prefers the first candidates."""
    placement = policy.place(row.num_prompt_tokens)
    num_sink = placement.layout.num_sink
    first = num_sink + placement.num_kept_used + placement.num_lent
    held = sum(
        1 << index
        for index in range(row.num_prompt_tokens)
        if index < first or index >= placement.candidates_end
    )
    return KeptTokens(row.num_prompt_tokens, ((held.to_bytes(-(-row.num_prompt_tokens // 8), "little"),),))


def _no_time(_batch: Batch) -> float:
    return 0.0


class FakeBackend:
    """Runs batches without a device.

    `step_time` returns the seconds of a batch on `clock`. `faults` are the errors of steps, counted from 0.
    """

    def __init__(
        self,
        spec: BackendSpec | None = None,
        *,
        clock: Clock | None = None,
        step_time: Callable[[Batch], float] = _no_time,
        faults: Mapping[int, BackendError] | None = None,
    ) -> None:
        self._spec = spec if spec is not None else fake_spec()
        self._clock = clock if clock is not None else VirtualClock()
        self._step_time = step_time
        self._faults = faults if faults is not None else {}
        self.num_submitted = 0  # batches so far
        self._pools: tuple[dict[int, _Contents], ...] = tuple({} for _ in self._spec.pools)
        self._scratches: dict[int, _Contents] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}  # of the prefix store, the tokens of each number
        self.prefix_archive: PrefixArchive | None = None

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    @property
    def code(self) -> CodeState:
        return CodeState.PLAIN

    def warmup(self) -> None:
        """Nothing here is slow at first."""

    def use_idle_time(self) -> bool:
        return False

    def close(self) -> None:
        """Forget everything."""
        for slots in self._pools:
            slots.clear()
        self._scratches.clear()
        self._blocks.clear()

    def submit(self, batch: Batch) -> Done:
        elapsed = self._step_time(batch)
        self._clock.elapse(elapsed)
        self.num_submitted += 1
        fault = self._faults.get(self.num_submitted - 1)
        if fault is not None:
            self._spoil_blocks(batch)
            return Done(fault)
        for store in batch.slot_stores:
            self._store_slot(store)
        return Done(
            self._prefill(batch, elapsed) if isinstance(batch, PrefillBatch) else self._decode(batch, elapsed)
        )

    def _prefill(self, batch: PrefillBatch, elapsed: float) -> BatchResult:
        self._check_prefill(batch)
        slots = self._pools[batch.pool]
        for row in batch.rows:
            if row.is_first:
                self._begin(row, slots)
        scores = tuple(self._score(row, slots) for row in batch.rows)  # before the chunk is written
        hidden = tuple(self._pooled(row, slots) for row in batch.rows)
        ends = tuple(self._importance(row, slots) for row in batch.rows)
        tokens = tuple(self._read(row, slots) for row in batch.rows)
        policy = self._spec.pools[batch.pool].policy
        kept = tuple(_kept_tokens(row, policy) if row.returns_kept else None for row in batch.rows)
        return BatchResult(tokens, elapsed, scores, hidden, importance=ends, kept=kept)

    def _read(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[SampledToken, ...]:
        """Write a chunk; fill all slots and draw the first tokens when it is the last."""
        held = self._contents(row, slots)
        held.write(row.token_ids)
        for block in row.stored_blocks:
            self._check_uncompressed(row)
            self._store_block(block, held.token_ids)
        if not row.is_last:
            return ()
        if row.scratch is not None:
            del self._scratches[row.scratch]
        slots.update({slot: held.copy() for slot in row.slots})
        return tuple(
            slots[slot].sample(draw, self._spec.vocab_size)
            for slot, draw in zip(row.slots, row.draws, strict=True)
        )

    def _contents(self, row: PrefillRow, slots: dict[int, _Contents]) -> _Contents:
        """Return where a chunk is written: a scratch, or the first of its slots."""
        store, index = self._target(row, slots)
        assert index in store, f"a prompt continues where it did not begin: {row}"
        return store[index]

    def _target(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[dict[int, _Contents], int]:
        return (slots, row.slots[0]) if row.scratch is None else (self._scratches, row.scratch)

    def _begin(self, row: PrefillRow, slots: dict[int, _Contents]) -> None:
        """Empty what a prompt is read into, and restore its stored blocks."""
        restored = [token_id for number in row.restored_blocks for token_id in self._blocks[number]]
        assert tuple(restored) == row.restored_token_ids, "the blocks hold other tokens"
        store, index = self._target(row, slots)
        store[index] = _Contents(row.num_prompt_tokens)
        store[index].write(restored)

    def _check_uncompressed(self, row: PrefillRow) -> None:
        """A scratch that has evicted entries no longer has the prompt's tokens in their order."""
        end = row.start + len(row.token_ids)
        limit = self._spec.scratch.layout.num_held(row.num_prompt_tokens)
        assert row.scratch is None or end <= limit, (row, limit)

    def _store_slot(self, store: SlotStore) -> None:
        held = self._pools[store.pool][store.slot]
        assert held.num_prompt_tokens == store.num_prompt_tokens, (store, held)
        assert tuple(held.token_ids[: len(store.token_ids)]) == store.token_ids, (store, held)
        assert self._spec.prefixes is not None, "this backend stores no blocks"
        end = (store.blocks[-1].index + 1) * self._spec.prefixes.block_tokens
        assert len(store.token_ids) == end, (store, "the tokens of the blocks and those before them")
        for block in store.blocks:
            self._store_block(block, held.token_ids)

    def _store_block(self, block: StoredBlock, token_ids: Sequence[int]) -> None:
        assert self._spec.prefixes is not None, "this backend stores no blocks"
        size = self._spec.prefixes.block_tokens
        assert 0 <= block.number < self._spec.prefixes.num_blocks, block
        tokens = tuple(token_ids[block.index * size : (block.index + 1) * size])
        assert len(tokens) == size, (block, "the block's tokens are not all written")
        self._blocks[block.number] = tokens

    def _spoil_blocks(self, batch: Batch) -> None:
        """Let what a failed step was to store hold nothing, so that a later restore of it is noticed."""
        stored = [store.blocks for store in batch.slot_stores]
        if isinstance(batch, PrefillBatch):
            stored += [row.stored_blocks for row in batch.rows]
        for blocks in stored:
            for block in blocks:
                self._blocks.pop(block.number, None)

    def block(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a stored block."""
        return self._blocks[number]

    def put_block(self, number: int, token_ids: tuple[int, ...]) -> None:
        """Overwrite a stored block."""
        self._blocks[number] = token_ids

    def _score(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[SampledToken, ...]:
        if row.score is None:
            return ()
        state = self._contents(row, slots).state
        scores: list[SampledToken] = []
        # Not strict: the prompt's last token has no target.
        for token_id, target in zip(row.token_ids, row.score.target_ids, strict=False):
            state = fold(state, (token_id,))
            scores.append(with_logprobs(state, target, row.score.num_top, self._spec.vocab_size))
        return tuple(scores)

    def _importance(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[float, ...]:
        if row.importance is None or not row.is_last:
            return ()
        token_ids = (*self._contents(row, slots).token_ids, *row.token_ids)
        return importance(token_ids, row.echo, row.echo_weight, row.importance.chunk_tokens)

    def _pooled(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[float, ...]:
        if row.pooling is None:
            return ()
        state = self._contents(row, slots).state
        vectors: list[tuple[float, ...]] = []
        for token_id in row.token_ids:
            state = fold(state, (token_id,))
            vectors.append(hidden_state(state, self._spec.embedding_size))
        if row.pooling is PromptPooling.LAST:
            return vectors[-1]
        return tuple(map(sum, zip(*vectors, strict=True)))

    def _decode(self, batch: DecodeBatch, elapsed: float) -> BatchResult:
        assert 1 <= batch.num_steps <= self._spec.max_decode_steps, batch.num_steps
        slots = [row.slot for row in batch.rows]
        assert len(slots) == len(set(slots)), f"a slot has two rows: {slots}"
        assert batch.num_steps == 1 or all(row.draw.allowed_mask is None for row in batch.rows), (
            "a mask for more than one step"
        )
        pool = self._pools[batch.pool]
        if batch.num_draft_tokens:
            return BatchResult(self._verify(batch), elapsed)
        return BatchResult(tuple(self._decode_row(row, pool, batch.num_steps) for row in batch.rows), elapsed)

    def _verify(self, batch: DecodeBatch) -> tuple[tuple[SampledToken, ...], ...]:
        """Take as many steps as the drafts' tokens are the ones drawn, and one more."""
        spec = self._spec.pools[batch.pool]
        assert batch.num_steps == 1, batch.num_steps
        assert batch.num_draft_tokens <= spec.max_draft_tokens, batch
        assert all(row.draw.is_plain for row in batch.rows), batch
        drawn = []
        for row in batch.rows:
            num_written = 1 + len(row.draft_token_ids)
            if row.draft_token_ids:
                assert num_written <= spec.draft_room(row.num_prompt_tokens, row.index), (row, spec)
                assert row.index + num_written <= self._spec.max_model_len, row
            tokens: list[SampledToken] = []
            for draft in (*row.draft_token_ids, None):
                tokens += self._decode_row(row, self._pools[batch.pool], 1)
                if tokens[-1].token_id != draft:
                    break
                draw = replace(row.draw, output_index=row.draw.output_index + 1)
                row = replace(row, token_id=draft, index=row.index + 1, draw=draw)
            drawn.append(tuple(tokens))
        return tuple(drawn)

    def _decode_row(
        self, row: DecodeRow, pool: dict[int, _Contents], num_steps: int
    ) -> tuple[SampledToken, ...]:
        assert row.slot in pool, f"slot {row.slot} holds nothing"
        held = pool[row.slot]
        assert row.index >= row.num_prompt_tokens, f"slot {row.slot} has no complete prompt"
        assert (row.index, row.num_prompt_tokens) == (len(held.token_ids), held.num_prompt_tokens), (
            row,
            held,
        )
        assert len(held.token_ids) + num_steps <= self._spec.max_model_len, (
            f"slot {row.slot} is over max_model_len"
        )
        held.write((row.token_id,))
        draw = row.draw
        tokens = [held.sample(draw, self._spec.vocab_size)]
        for _ in range(num_steps - 1):
            draw = replace(
                draw, output_index=draw.output_index + 1, forced_token_ids=draw.forced_token_ids[1:]
            )
            held.write((tokens[-1].token_id,))
            tokens.append(held.sample(draw, self._spec.vocab_size))
        return tuple(tokens)

    def _check_prefill(self, batch: PrefillBatch) -> None:
        rows = batch.rows
        assert batch.shape in self._spec.prefill_shapes, batch.shape
        assert 0 < len(rows) <= batch.shape.num_rows, (len(rows), batch.shape)
        assert len({row.scratch is None for row in rows}) == 1, "rows with and without scratch in one batch"
        assert len({row.pooling is None for row in rows}) == 1, "rows with and without pooling in one batch"
        targets = [slot for row in rows for slot in row.slots]
        scratches = [row.scratch for row in rows if row.scratch is not None]
        assert len(targets) == len(set(targets)), f"a slot has two rows: {targets}"
        assert len(scratches) == len(set(scratches)), f"a scratch has two rows: {scratches}"
        assert all(0 <= slot < self._spec.pools[batch.pool].num_slots for slot in targets), targets
        assert all(0 <= scratch < self._spec.scratch.num_scratch for scratch in scratches), scratches
        for row in rows:
            self._check_row(row, batch.shape, batch.pool)

    def _check_row(self, row: PrefillRow, shape: PrefillShape, pool: int) -> None:
        assert 0 < len(row.token_ids) <= shape.num_tokens, (len(row.token_ids), shape)
        assert row.start + len(row.token_ids) <= row.num_prompt_tokens, row
        assert len(row.draws) == (len(row.slots) if row.is_last else 0), row
        if row.scratch is None:
            assert row.num_prompt_tokens <= self._spec.pools[pool].max_direct_tokens, row
        else:
            self._check_round(row, self._spec.scratch.layout, pool)
        assert row.scratch is not None or row.slots, "a row with neither slot nor scratch"
        if not row.is_first:
            held = self._contents(row, self._pools[pool])
            expected = row.start, row.num_prompt_tokens
            assert (len(held.token_ids), held.num_prompt_tokens) == expected, (row, held)

    def _check_round(self, row: PrefillRow, layout: ScratchLayout, pool: int) -> None:
        assert layout.admits(row.num_prompt_tokens), row
        end = row.start + len(row.token_ids)
        limit = layout.round_end(row.start, row.num_prompt_tokens)
        assert end <= limit, f"a chunk up to {end} where entries are evicted at {limit}"
        evicts = end == limit and not row.is_last
        assert len(row.ahead) == (layout.num_ahead if evicts else 0), row
        policy = self._spec.pools[pool].policy
        chooses = row.importance is not None or policy.must_choose(row.num_prompt_tokens)
        num_echoed = policy.num_echoed if chooses else 0
        assert len(row.echo) <= num_echoed, row
        if row.importance is None:
            assert bool(row.echo) == (num_echoed > 0 and (evicts or (row.is_last and bool(row.slots)))), row

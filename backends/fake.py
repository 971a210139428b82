"""A backend without a model: deterministic tokens, checked batches, time by a formula. No torch anywhere on its path.

What a slot holds is folded into one number, token by token, and every choice of a token follows from that number. So a mixed-up slot or a
chunk left out changes the tokens, which `expected_tokens` gives without any batches. Impossible batches are our own faults and raise
AssertionError.

The made-up model: a sequence's state picks the most likely token; the `_NUM_LEADERS` token ids from there on have falling logits, all
others have logit 0. No slot is too small for it: it evicts nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.clock import Clock, VirtualClock
from backends.interface import (
    BackendError,
    BackendSpec,
    Batch,
    BatchResult,
    DecodeBatch,
    DecodeRow,
    Draw,
    Feature,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    SampledToken,
    SamplingParams,
    ScratchSpec,
    SlotPoolSpec,
)
from cache.policy import CachePolicy, full

_NUM_LEADERS = 24
_LOGIT_STEP = 0.5
_MASK = (1 << 64) - 1
_FEATURES = frozenset(Feature) - {Feature.PENALTIES}


def fake_spec(
    *,
    num_slots: int = 8,
    max_model_len: int = 4096,
    policy: CachePolicy | None = None,
    num_scratch: int = 2,
    prefill_shapes: Sequence[PrefillShape] = (PrefillShape(1, 64), PrefillShape(4, 64), PrefillShape(1, 256)),
    vocab_size: int = 512,
    max_decode_steps: int = 4,
    features: frozenset[Feature] = _FEATURES,
) -> BackendSpec:
    """Return a spec that the fake backend can have; the policy is `full` unless given."""
    policy = policy if policy is not None else full(max_model_len)
    return BackendSpec(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        pools=(SlotPoolSpec(num_slots, policy, min(policy.max_direct_tokens, max_model_len)),),
        scratch=ScratchSpec(num_scratch, max_model_len),
        prefill_shapes=tuple(sorted(prefill_shapes, key=lambda shape: (shape.num_tokens, shape.num_rows))),
        features=features,
        max_decode_steps=max_decode_steps,
    )


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    *,
    vocab_size: int,
    choice: int = 0,
    min_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the first `num_tokens` tokens that a sequence gets if nothing ends it, the stop tokens banned until `min_tokens`."""
    state, tokens = _fold(0, prompt), list[int]()
    for index in range(num_tokens):
        banned = tuple(stop_token_ids) if index < min_tokens else ()
        tokens.append(_choose(state, Draw(sampling, choice, index, banned), vocab_size))
        state = _fold(state, tokens[-1:])
    return tokens


@dataclass(slots=True)
class _Place:
    """What a slot or a scratch holds."""

    state: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0

    def write(self, token_ids: Sequence[int]) -> None:
        self.state = _fold(self.state, token_ids)
        self.num_tokens += len(token_ids)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has ended, well or not."""

    outcome: BatchResult | BackendError

    def result(self) -> BatchResult:
        if isinstance(self.outcome, BackendError):
            raise self.outcome
        return self.outcome


def _no_time(_batch: Batch) -> float:
    return 0.0


class FakeBackend:
    """Runs batches on nothing. `step_time` gives the seconds of a batch on `clock`, `faults` the errors of steps, counted from 0."""

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
        self._slots: dict[int, _Place] = {}
        self._scratches: dict[int, _Place] = {}

    @property
    def spec(self) -> BackendSpec:
        return self._spec

    def warmup(self) -> None:
        """Nothing here is slow at first."""

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._scratches.clear()

    def submit(self, batch: Batch) -> Done:
        elapsed = self._step_time(batch)
        self._clock.elapse(elapsed)
        self.num_submitted += 1
        fault = self._faults.get(self.num_submitted - 1)
        if fault is not None:
            return Done(fault)
        return Done(self._prefill(batch, elapsed) if isinstance(batch, PrefillBatch) else self._decode(batch, elapsed))

    def _prefill(self, batch: PrefillBatch, elapsed: float) -> BatchResult:
        self._check_prefill(batch)
        scores = tuple(self._score(row) for row in batch.rows)  # before the chunk is written
        return BatchResult(tuple(self._read(row) for row in batch.rows), elapsed, scores)

    def _read(self, row: PrefillRow) -> tuple[SampledToken, ...]:
        """Write a chunk; pack it and draw the first tokens when it is the last."""
        places = self._places(row)
        for place in places:
            place.write(row.token_ids)
        if not row.is_last:
            return ()
        if row.scratch is not None:
            del self._scratches[row.scratch]
            self._slots.update({slot: _Place(places[0].state, row.num_prompt_tokens, row.num_prompt_tokens) for slot in row.slots})
        return tuple(_sample(places[0].state, draw, self._spec.vocab_size) for draw in row.draws)

    def _places(self, row: PrefillRow) -> list[_Place]:
        """Return where a chunk is written, emptied first if it is a prompt's first chunk."""
        store, names = (self._slots, row.slots) if row.scratch is None else (self._scratches, (row.scratch,))
        if row.start == 0:
            store.update({name: _Place(num_prompt_tokens=row.num_prompt_tokens) for name in names})
        return [store[name] for name in names]

    def _score(self, row: PrefillRow) -> tuple[SampledToken, ...]:
        if row.score is None:
            return ()
        state, scores = self._places(row)[0].state, list[SampledToken]()
        for token_id, target in zip(row.token_ids, row.score.target_ids, strict=False):  # the prompt's last token has no target
            state = _fold(state, (token_id,))
            scores.append(_with_logprobs(state, target, row.score.num_top, self._spec.vocab_size))
        return tuple(scores)

    def _decode(self, batch: DecodeBatch, elapsed: float) -> BatchResult:
        assert 1 <= batch.num_steps <= self._spec.max_decode_steps, batch.num_steps
        slots = [row.slot for row in batch.rows]
        assert len(slots) == len(set(slots)), f"a slot has two rows: {slots}"
        return BatchResult(tuple(self._decode_row(row, batch.num_steps) for row in batch.rows), elapsed)

    def _decode_row(self, row: DecodeRow, num_steps: int) -> tuple[SampledToken, ...]:
        place = self._slots[row.slot]
        assert place.num_prompt_tokens <= place.num_tokens, f"slot {row.slot} has no complete prompt"
        assert (row.index, row.num_prompt_tokens) == (place.num_tokens, place.num_prompt_tokens), (row, place)
        assert place.num_tokens + num_steps <= self._spec.max_model_len, f"slot {row.slot} is over max_model_len"
        draw, tokens = row.draw, [SampledToken(row.token_id)]
        for step in range(num_steps):
            if step > 0:
                draw = Draw(draw.sampling, draw.choice, draw.output_index + 1, draw.banned_token_ids)
            place.write((tokens[-1].token_id,))
            tokens.append(_sample(place.state, draw, self._spec.vocab_size))
        return tuple(tokens[1:])

    def _check_prefill(self, batch: PrefillBatch) -> None:
        rows = batch.rows
        assert batch.shape in self._spec.prefill_shapes, batch.shape
        assert 0 < len(rows) <= batch.shape.num_rows, (len(rows), batch.shape)
        assert len({row.scratch is None for row in rows}) == 1, "rows with and without scratch in one batch"
        places = [slot for row in rows for slot in row.slots]
        scratches = [row.scratch for row in rows if row.scratch is not None]
        assert len(places) == len(set(places)), f"a slot has two rows: {places}"
        assert len(scratches) == len(set(scratches)), f"a scratch has two rows: {scratches}"
        assert all(0 <= slot < self._spec.pools[0].num_slots for slot in places), places
        assert all(0 <= scratch < self._spec.scratch.num_scratch for scratch in scratches), scratches
        for row in rows:
            self._check_row(row, batch.shape)

    def _check_row(self, row: PrefillRow, shape: PrefillShape) -> None:
        assert 0 < len(row.token_ids) <= shape.num_tokens, (len(row.token_ids), shape)
        assert row.start + len(row.token_ids) <= row.num_prompt_tokens, row
        assert len(row.draws) == (len(row.slots) if row.is_last else 0), row
        limit = self._spec.scratch.max_tokens if row.scratch is not None else self._spec.pools[0].max_direct_tokens
        assert row.num_prompt_tokens <= limit, (row.num_prompt_tokens, limit)
        assert row.scratch is not None or row.slots, "a row with neither slot nor scratch"
        if row.start > 0:
            for place in self._places(row):
                assert (place.num_tokens, place.num_prompt_tokens) == (row.start, row.num_prompt_tokens), (row, place)


def _fold(state: int, token_ids: Sequence[int]) -> int:
    for token_id in token_ids:
        state = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
    return state


def _leader(state: int, vocab_size: int) -> int:
    return (state >> 16) % vocab_size


def _logit(state: int, token_id: int, vocab_size: int) -> float:
    rank = (token_id - _leader(state, vocab_size)) % vocab_size
    return (_NUM_LEADERS - rank) * _LOGIT_STEP if rank < _NUM_LEADERS else 0.0


def _choose(state: int, draw: Draw, vocab_size: int) -> int:
    sampling = draw.sampling
    leader = _leader(state, vocab_size)
    if sampling.is_greedy and not draw.banned_token_ids and not sampling.logit_bias:
        return leader
    bias = dict(sampling.logit_bias)
    num_candidates = min(_NUM_LEADERS + len(bias) + len(draw.banned_token_ids), vocab_size)  # enough that some are left
    candidates = {(leader + rank) % vocab_size for rank in range(num_candidates)} | bias.keys()
    logits = {token: _logit(state, token, vocab_size) + bias.get(token, 0.0) for token in candidates - set(draw.banned_token_ids)}
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if sampling.is_greedy:
        return ranked[0]
    weights = _truncated([math.exp((logits[token] - logits[ranked[0]]) / sampling.temperature) for token in ranked], sampling)
    return ranked[_invert(weights, _uniform(state, draw))]


def _truncated(weights: list[float], sampling: SamplingParams) -> list[float]:
    """Leave out, from falling weights, what top_k, top_p and min_p exclude."""
    if sampling.top_k > 0:
        weights = weights[: sampling.top_k]
    total, mass, num_kept = sum(weights), 0.0, 0
    for weight in weights:
        if num_kept > 0 and mass >= sampling.top_p * total:
            break
        mass, num_kept = mass + weight, num_kept + 1
    return [weight for weight in weights[:num_kept] if weight >= sampling.min_p * weights[0]]


def _invert(weights: Sequence[float], uniform: float) -> int:
    threshold = uniform * sum(weights)
    for position, weight in enumerate(weights):
        threshold -= weight
        if threshold < 0:
            return position
    return len(weights) - 1


def _uniform(state: int, draw: Draw) -> float:
    key = _fold(state, (draw.sampling.seed & _MASK, draw.choice, draw.output_index))
    return (key >> 11) / (1 << 53)


def _sample(state: int, draw: Draw, vocab_size: int) -> SampledToken:
    token_id = _choose(state, draw, vocab_size)
    if draw.sampling.num_logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(state, token_id, draw.sampling.num_logprobs, vocab_size)


def _with_logprobs(state: int, token_id: int, num_top: int, vocab_size: int) -> SampledToken:
    num_leaders = min(_NUM_LEADERS, vocab_size)
    mass = sum(math.exp((_NUM_LEADERS - rank) * _LOGIT_STEP) for rank in range(num_leaders)) + vocab_size - num_leaders
    leader = _leader(state, vocab_size)
    top = [(leader + rank) % vocab_size for rank in range(min(num_top, vocab_size))]
    pairs = [(token, _logit(state, token, vocab_size) - math.log(mass)) for token in (token_id, *top)]
    return SampledToken(token_id, pairs[0][1], tuple(pairs[1:]))

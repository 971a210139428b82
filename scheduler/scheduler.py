"""Which sequences are admitted, which device step is next, and how its result changes each sequence.

It knows requests, slots and scratches as integers, and time by its clock. It knows no text, no tensor and no
device: limits come from the `BackendSpec`. Outputs are gathered and returned by `take_outputs`, so none is
lost when a step raises. Every sequence ends with exactly one final output.

A sequence is admitted when it gets a slot of its pool, and a scratch if it needs one. A slot's size is fixed,
so an admitted sequence cannot run out of cache. The queue's order holds within each of a pool's two lines
(with scratch and without). Across lines and pools, the head that ranks first is admitted first. A head that
has no slot or scratch is passed over by the heads of other lines, never by its own line. So it is admitted as
soon as both are free. `scheduler.room` says what is left to others.

Drafts take turns with the model that answers, one step of one model at a time. They only read prompts.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from backends.clock import Clock
from backends.interface import (
    BackendSpec,
    Batch,
    BatchResult,
    DecodeBatch,
    PrefillBatch,
    PrefixArchive,
    SampledToken,
    SequencesLostError,
)
from cache.free_list import FreeList
from scheduler.admission import needs_scratch
from scheduler.config import SchedulerConfig
from scheduler.constraints import ConstraintError, Constraints, Matcher
from scheduler.decode_rotation import DecodeRotation
from scheduler.fairness import DeviceTurns
from scheduler.messages import (
    Abort,
    Add,
    AdmittedAdd,
    EngineOutput,
    Final,
    Finish,
    FinishReason,
    ServedElsewhere,
    Timing,
    WatchSlots,
)
from scheduler.model_state import ModelState, model_states
from scheduler.pacing import Pacing
from scheduler.pool_state import PoolState
from scheduler.prefill import Prefill
from scheduler.prefill_rotation import PrefillRotation
from scheduler.request import Request, RequestStatus
from scheduler.room import Room
from scheduler.stats import PoolStats, SchedulerStats, SlotUse
from scheduler.waiting import QueueOrder, WaitingQueue


class Scheduler:
    """Used by one thread, with one batch under way at a time.

    After a `schedule` that returned a batch, call `update` or `fail`. Without `constraints`, requests that
    have a grammar are refused.
    """

    def __init__(
        self,
        spec: BackendSpec,
        config: SchedulerConfig,
        clock: Clock,
        constraints: Constraints | None = None,
        archive: PrefixArchive | None = None,
    ) -> None:
        self._spec = spec
        self._config = config
        self._clock = clock
        self._constraints = constraints
        pools = [(pool, index) for index, model in enumerate(spec.models) for pool in model.pools]
        self._pools = tuple(PoolState(index, *pool) for index, pool in enumerate(pools))
        self._turns = DeviceTurns() if config.order is QueueOrder.FAIR else None
        self._decodes = DecodeRotation(
            self._pools,
            min(spec.max_decode_steps, config.max_decode_steps),
            config.num_speculative_tokens,
            self._turns,
        )
        self._models = model_states(spec, archive)
        self._pacing = Pacing([model.prefill_shapes for model in spec.models], config.max_inter_token_latency)
        self._waiting = WaitingQueue(config.order)
        self._prefills = PrefillRotation(self._pools, self._models, self._waiting, self._turns)
        self._room = Room(
            config, clock, self._pools, self._models, self._prefills.reading, self._waiting, self._turns
        )
        self._open: dict[str, dict[int, Request]] = {}  # by request id and choice, until the final output
        self._deadlines: list[tuple[float, str]] = []  # a heap; may name requests that have ended
        self._arrival_order = itertools.count()
        self._reports_slots = config.reports_slots
        self._num_discarded_tokens = 0
        self._outputs: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence has yet to end."""
        return bool(self._open)

    @property
    def is_reading(self) -> bool:
        """Whether a prompt is being read."""
        return bool(self._prefills.reading)

    @property
    def num_waiting(self) -> int:
        """How many sequences wait to be admitted."""
        return len(self._waiting)

    @property
    def num_slots_in_use(self) -> int:
        """How many slots are held, of all pools that answer."""
        return sum(pool.slots.num_used for pool in self._pools[: len(self._spec.pools)])

    def add(self, add: AdmittedAdd) -> None:
        """Queue each choice of a request, or refuse all of them when the queue is full."""
        assert add.num_choices > 0, add.num_choices
        assert add.request_id not in self._open, f"request {add.request_id} is already open"
        if not add.is_background and self._would_wait_too_many(add):
            self.refuse(add, FinishReason.QUEUE_FULL, self._queue_full_message(add))
        else:
            try:
                self._accept(add)
            except ConstraintError as error:
                self.refuse(add, FinishReason.REJECTED, str(error))

    def finish(self, finish: Finish) -> None:
        """End a choice by a stop string. Has no effect on a choice that has ended."""
        request = self._open.get(finish.request_id, {}).get(finish.choice)
        if request is not None:
            request.cut(finish.num_tokens)
            self._end(request, FinishReason.STOP)

    def abort(self, abort: Abort) -> None:
        """End the open choices of a request."""
        self._end_all(abort.request_id, FinishReason.ABORT)

    def expire(self) -> None:
        """End the sequences whose deadline has passed."""
        now = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            for request in list(self._open.get(request_id, {}).values()):
                self._end_if_overdue(request, now)

    def schedule(self) -> Batch | None:
        """Admit the sequences for which there is room and return the next step; None: no sequence is left."""
        self._admit()
        batch = self._next_batch()
        stores = self._model_of(batch.pool).prefixes.take_slot_stores() if batch is not None else ()
        return replace(batch, slot_stores=stores) if batch is not None and stores else batch

    def update(self, batch: Batch, result: BatchResult) -> None:
        """Apply a step's result to its sequences."""
        now = self._clock.now()
        self._model_of(batch.pool).prefixes.update()
        if self._turns is not None:
            adds = [request.add for request in self._in_step(batch)]
            self._turns.charge([add.tenant for add in adds if not add.is_background], result.elapsed)
        pool = self._pools[batch.pool]
        is_partial = isinstance(batch, DecodeBatch) and len(batch.rows) < len(pool.decoding)
        is_retry = is_partial and any(request.is_retried for request in self._in_step(batch))
        if isinstance(batch, PrefillBatch):
            self._update_prefill(batch, result, now)
        else:
            self._update_decode(batch, result, now)
        self._pacing.observe(batch, result.elapsed, now, pool.model, is_partial=is_partial, is_retry=is_retry)

    def fail(self, batch: Batch, error: Exception) -> int:
        """Let each sequence of a failed step try it once more, alone. Return how many have ended instead.

        These are the ones whose second try has failed, or for which the error allows none.
        """
        self._model_of(batch.pool).prefixes.fail()
        is_lost = isinstance(error, SequencesLostError)
        ended: list[Request] = []
        if isinstance(batch, PrefillBatch):
            for prefill in self._prefills.in_flight:
                if is_lost or prefill.is_retried:
                    ended += prefill.requests
                else:
                    self._prefills.restart(prefill)
        else:
            for request in self._in_step(batch):
                if is_lost or request.is_retried:
                    ended.append(request)
                request.is_retried = True
        for request in ended:
            self._end(request, FinishReason.ERROR, str(error))
        return len(ended)

    def fail_all(self, reason: FinishReason, message: str) -> None:
        """End every sequence. Only `refuse`, `take_outputs` and `stats` may be called afterwards."""
        # Slots and scratches are not released: after an exception the bookkeeping may be inconsistent, and a
        # release that raises would cost the other sequences their final output. No sequence is admitted
        # again, so none needs a slot.
        for choices in self._open.values():
            for request in choices.values():
                self._emit(request, final=self._final(request, reason, message))
        self._open.clear()
        self._prefills.reading.clear()
        for pool in self._pools:
            pool.decoding.clear()
        self._waiting = WaitingQueue(self._config.order)

    def charge_elsewhere(self, served: ServedElsewhere) -> None:
        self._waiting.charge_elsewhere(served.num_weighted)

    def reset_prefixes(self) -> None:
        """Forget all stored blocks of prompts."""
        for model in self._models:
            model.prefixes.reset()

    def refuse(self, add: Add, reason: FinishReason, message: str) -> None:
        """Give each choice of a request its final output without queueing it."""
        timing = Timing(add.arrival_time, admitted=None, first_token=None, finished=self._clock.now())
        final = Final(reason, timing, len(add.prompt_token_ids), num_output_tokens=0, message=message)
        self._outputs += [
            EngineOutput(add.request_id, choice, final=final) for choice in range(add.num_choices)
        ]

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs since the last call."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def live(self) -> list[Request]:
        """Return the admitted sequences that have not ended."""
        return self._room.live()

    def stats(self) -> SchedulerStats:
        """Return the current state."""
        pools = tuple(
            PoolStats(self._waiting.num_waiting(pool.index), pool.slots.num_used)
            for pool in self._pools[: len(self._spec.pools)]
        )
        answering = self._models[0]
        return SchedulerStats(
            num_running=len(self.live()),
            num_waiting=len(self._waiting),
            num_slots_in_use=self.num_slots_in_use,
            num_scratch_in_use=answering.scratches.num_used,
            num_unread_prompt_tokens=sum(prefill.num_remaining_tokens for prefill in self._prefills.reading),
            num_discarded_tokens=self._num_discarded_tokens,
            pools=pools,
            prefixes=answering.prefixes.stats(),
            slots=tuple(self._slot_uses()) if self._reports_slots else (),
        )

    def watch_slots(self, watch: WatchSlots) -> None:
        """Report the held slots from now on, or no longer unless the configuration says so."""
        self._reports_slots = watch.is_watched or self._config.reports_slots

    def _slot_uses(self) -> Iterator[SlotUse]:
        for request in self.live():
            if request.slot is not None:
                yield request.slot_use(self._pools[request.add.pool].spec.policy)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every held slot and scratch has exactly one live sequence."""
        requests = self.live()
        for pool in self._pools:
            slots = [request.slot for request in requests if request.add.pool == pool.index]
            _check_held(pool.slots, slots, f"slots of pool {pool.index}")
        for index, model in enumerate(self._models):
            model.prefixes.check_integrity()
            scratches = [prefill.scratch for prefill in self._prefills.reading if prefill.model == index]
            _check_held(model.scratches, scratches, f"scratches of model {index}")
        num_open = sum(len(choices) for choices in self._open.values())
        assert len(requests) + len(self._waiting) == num_open, (len(requests), len(self._waiting), num_open)

    # Arrival

    def _accept(self, add: Add) -> None:
        has_scratch = needs_scratch(add, self._spec)
        turn = next(self._arrival_order) if add.turn is None else add.turn
        requests = [
            Request(add, choice, has_scratch, turn, matcher=matcher)
            for choice, matcher in enumerate(self._matchers(add))
        ]
        self._open[add.request_id] = {request.choice: request for request in requests}
        for request in requests:
            self._waiting.push(request)
            self._emit(request)
        for deadline in (add.queue_deadline, add.deadline):
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, add.request_id))

    def _matchers(self, add: Add) -> Sequence[Matcher | None]:
        if add.grammar is None:
            return [None] * add.num_choices
        if self._constraints is None:
            raise ConstraintError("this engine does not support grammars")
        return self._constraints.matchers(add.grammar, add.num_choices)

    def _queue_full_message(self, add: Add) -> str:
        num_waiting = self._num_waiting_with(add)
        limit = self._config.max_num_waiting
        return f"with {add.num_choices} more sequences, {num_waiting} would wait, and at most {limit} may"

    def _would_wait_too_many(self, add: Add) -> bool:
        # Most queues are short: then the open sequences need not be counted.
        limit = self._config.max_num_waiting
        is_possible = self._waiting.num_waiting(add.pool) + add.num_choices > limit
        return is_possible and self._num_waiting_with(add) > limit

    def _num_waiting_with(self, add: Add) -> int:
        """Return how many foreground sequences would wait for the pool's slots if `add` were queued.

        In a draft's pool, which has none, they wait for scratches.
        """
        # Open background sequences are subtracted whether they wait or hold a slot: foreground requests are
        # served before those that wait, and those that hold a slot count as if their slots were free.
        pool = self._pools[add.pool]
        others = (request.add for choices in self._open.values() for request in choices.values())
        num_background = sum(other.is_background and other.pool == add.pool for other in others)
        waited_for = pool.slots if add.importance is None else self._model_of(add.pool).scratches
        return self._waiting.num_waiting(add.pool) - num_background + add.num_choices - waited_for.num_free

    def _in_step(self, batch: Batch) -> list[Request]:
        """Return the sequences of the step under way."""
        if isinstance(batch, PrefillBatch):
            return [request for prefill in self._prefills.in_flight for request in prefill.requests]
        return [self._pools[batch.pool].decoding[row.slot] for row in batch.rows]

    def _pool_of(self, request: Request) -> PoolState:
        return self._pools[request.add.pool]

    def _model_of(self, pool: int) -> ModelState:
        return self._models[self._pools[pool].model]

    # Admission

    def _admit(self) -> None:
        while (request := self._waiting.first(self._room.has_room)) is not None:
            model = self._model_of(request.add.pool)
            scratch = model.scratches.acquire(request.add.request_id) if request.needs_scratch else None
            policy = self._pool_of(request).spec.policy
            chooses = request.add.importance is not None or policy.must_choose(request.num_prefill_tokens)
            num_echoed = policy.num_echoed if chooses else 0
            layout = model.spec.scratch.layout
            siblings = self._with_siblings(request)
            prefill = Prefill(siblings, scratch, layout, num_echoed, self._pool_of(request).model)
            for admitted in prefill.requests:
                self._take_slot(admitted)
            self._waiting.charge(request.add, num_input=prefill.num_remaining_tokens)
            model.prefixes.admit(prefill)
            self._prefills.reading.append(prefill)

    def _with_siblings(self, request: Request) -> list[Request]:
        """Return the choices that share one prefill: all that wait, as far as there are free slots."""
        siblings = [
            other
            for other in self._open[request.add.request_id].values()
            if other.status is RequestStatus.WAITING
        ]
        return siblings[: self._room.num_free_slots(request.add)] if request.add.needs_slot else siblings

    def _take_slot(self, request: Request) -> None:
        self._waiting.remove(request)
        request.status = RequestStatus.PREFILL
        request.admitted_time = self._clock.now()
        if self._turns is not None and not request.add.is_background:
            self._turns.enter(request.add.tenant, request.admitted_time)
        if request.add.needs_slot:
            request.slot = self._pool_of(request).slots.acquire(request.add.request_id)

    # Steps

    def _next_batch(self) -> Batch | None:
        batch: Batch | None = None
        if not self._decodes.is_under_way:
            decoding = self._decodes.decoding()
            batch = self._prefills.next_batch(self._pacing, decoding, self._clock.now())
        return batch or self._decode_batch()

    def _decode_batch(self) -> DecodeBatch | None:
        now = self._clock.now()
        return self._decodes.next_batch(self._waiting, self._pacing, now, prompt_waits=self._prefills.has_due)

    def _update_prefill(self, batch: PrefillBatch, result: BatchResult, now: float) -> None:
        self._prefills.alternate()
        for index, (prefill, row) in enumerate(zip(self._prefills.in_flight, batch.rows, strict=True)):
            prompt_logprobs = result.prompt_logprobs[index] if row.score is not None else ()
            hidden = result.hidden[index] if row.pooling is not None else ()
            prefill.advance(len(row.token_ids), prompt_logprobs, hidden)
            if row.importance is not None:
                prefill.requests[0].importance = result.importance[index]
            if row.is_last:
                if row.returns_kept:
                    prefill.requests[0].kept = result.kept[index]
                self._prefills.reading.remove(prefill)
                self._finish_prefill(prefill, result.tokens[index], now)
            else:
                for request in prefill.requests:
                    self._emit(request)

    def _finish_prefill(self, prefill: Prefill, sampled: tuple[SampledToken, ...], now: float) -> None:
        if prefill.scratch is not None:
            self._models[prefill.model].scratches.release(prefill.scratch)
        if not self._decodes.decoding():
            self._pacing.mark_decode_due(now)
        for index, request in enumerate(prefill.requests):
            if request.choice == 0:
                request.prompt_logprobs = prefill.prompt_logprobs
            request.status = RequestStatus.DECODE
            if request.slot is None:
                request.embedding = prefill.embedding
                self._end(request, FinishReason.LENGTH)
            else:
                self._pool_of(request).decoding[request.slot] = request
                self._take_tokens(request, sampled[index : index + 1], now)

    def _update_decode(self, batch: DecodeBatch, result: BatchResult, now: float) -> None:
        for row, sampled in zip(batch.rows, result.tokens, strict=True):
            request = self._pools[batch.pool].decoding[row.slot]
            # A launch may have failed after these steps.
            request.is_retried = not batch.num_draft_tokens and len(sampled) < batch.num_steps
            request.num_computed_tokens += len(sampled)
            if row.draft_token_ids:
                request.observe_draft(len(row.draft_token_ids), sampled)
            self._take_tokens(request, sampled, now)

    def _take_tokens(self, request: Request, sampled: tuple[SampledToken, ...], now: float) -> None:
        # A forced token costs a decode step like a sampled one, so both are charged as output.
        num_before = request.num_output_tokens - request.num_forced_left
        try:
            tokens = request.append(sampled)
        except ConstraintError as error:
            self._end(request, FinishReason.REJECTED, str(error))
            return
        num_after = request.num_output_tokens - request.num_forced_left
        self._waiting.charge(request.add, num_output=num_after - num_before)
        if request.num_output_tokens > 0 and request.first_token_time is None:
            request.first_token_time = now
        if request.finish_reason is not None:
            self._end(request, request.finish_reason, tokens=tokens)
        else:
            self._emit(request, tokens)

    # The end of a sequence

    def _end_if_overdue(self, request: Request, now: float) -> None:
        add = request.add
        is_waiting = request.status is RequestStatus.WAITING
        if add.deadline is not None and add.deadline <= now:
            self._end(request, FinishReason.TIMEOUT, f"not finished within {add.timeout:g} s")
        elif add.queue_deadline is not None and add.queue_deadline <= now and is_waiting:
            self._end(request, FinishReason.QUEUE_TIMEOUT, f"no slot was free within {add.queue_timeout:g} s")

    def _end_all(self, request_id: str, reason: FinishReason) -> None:
        for request in list(self._open.get(request_id, {}).values()):
            self._end(request, reason)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        message: str | None = None,
        *,
        tokens: tuple[SampledToken, ...] = (),
    ) -> None:
        """Emit the final output of a sequence, and release its slot and scratch."""
        final = self._final(request, reason, message)
        choices = self._open[request.add.request_id]
        del choices[request.choice]
        if not choices:
            del self._open[request.add.request_id]
        self._emit(request, tokens, final)
        self._num_discarded_tokens += request.num_discarded_tokens
        if reason is not FinishReason.ERROR:  # after which the slot's contents are unknown
            self._model_of(request.add.pool).prefixes.store_answer(request)
        self._release(request)
        request.status = RequestStatus.FINISHED

    def _final(self, request: Request, reason: FinishReason, message: str | None) -> Final:
        return request.final(reason, self._clock.now(), self._pool_of(request).spec.policy, message)

    def _release(self, request: Request) -> None:
        pool = self._pool_of(request)
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        elif request.status is RequestStatus.PREFILL:
            self._leave_prefill(request)
        elif request.slot is not None:
            del pool.decoding[request.slot]
        is_counted = request.status is not RequestStatus.WAITING and not request.add.is_background
        if is_counted and self._turns is not None:
            self._turns.leave(request.add.tenant, self._clock.now())
        if request.slot is not None:
            pool.slots.release(request.slot)

    def _leave_prefill(self, request: Request) -> None:
        """Take a choice out of its prefill, which goes on as long as another choice needs it."""
        prefill = next(prefill for prefill in self._prefills.reading if request in prefill.requests)
        if prefill.scratch is None and request is prefill.requests[0] and len(prefill.requests) > 1:
            # Its slot holds what was read so far, so the next choice takes it over.
            heir = prefill.requests[1]
            request.slot, heir.slot = heir.slot, request.slot
        prefill.requests.remove(request)
        if not prefill.requests:
            self._prefills.reading.remove(prefill)
            # Admission charged the whole prompt: refund the part that was neither read nor restored.
            num_unread = request.num_prefill_tokens
            if prefill.has_begun:
                num_unread -= request.num_computed_tokens
            self._waiting.charge(request.add, num_input=-num_unread)
            if prefill.scratch is not None:
                self._models[prefill.model].scratches.release(prefill.scratch)

    def _emit(
        self, request: Request, tokens: tuple[SampledToken, ...] = (), final: Final | None = None
    ) -> None:
        self._outputs.append(
            EngineOutput(
                request_id=request.add.request_id,
                choice=request.choice,
                tokens=tokens,
                num_computed_prompt_tokens=request.num_read_prompt_tokens,
                prompt_logprobs=request.take_prompt_logprobs(),
                embedding=request.embedding,
                importance=request.importance,
                kept=request.kept,
                final=final,
            )
        )
        request.kept = None


def _check_held(pool: FreeList, held: Sequence[int | None], what: str) -> None:
    """Raise AssertionError unless `held`, without its Nones, names each used slot of `pool` once."""
    pool.check_integrity()
    slots = [slot for slot in held if slot is not None]
    assert len(slots) == len(set(slots)) == pool.num_used, (what, slots, pool.num_used)

"""Which prompts are read, and which of them the next prefill step reads."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from backends.interface import PrefillBatch, PrefillRow
from scheduler.fairness import DeviceTurns
from scheduler.model_state import ModelState
from scheduler.pacing import Pacing
from scheduler.pool_state import PoolState
from scheduler.prefill import Prefill
from scheduler.waiting import WaitingQueue


class PrefillRotation:
    """The admitted prompts that are not completely read, and the step that reads some of them.

    Steps alternate between the oldest prompt and the one with the fewest tokens left. The oldest alone would
    hold up short prompts behind a long one. The shortest alone would starve it. `turns` is None in the orders
    that know no tenants.
    """

    def __init__(
        self,
        pools: Sequence[PoolState],
        models: Sequence[ModelState],
        waiting: WaitingQueue,
        turns: DeviceTurns | None,
    ) -> None:
        self.reading: list[Prefill] = []  # in the order of admission
        self.in_flight: tuple[Prefill, ...] = ()  # row by row, the prompts of the step under way
        self._pools = pools
        self._models = models
        self._waiting = waiting
        self._turns = turns
        self._reads_oldest = True
        self.has_due = False  # whether a prompt could be read when a step was last sought

    def next_batch(self, pacing: Pacing, decoding: Sequence[int], now: float) -> PrefillBatch | None:
        """Return a batch with the prompt whose turn it is and others that fit. None: decode goes first.

        `decoding` are the indices of the pools that decode. A short prompt waits for at most one chunk of a
        long one, and a long one always advances. Prompts of equal length are read one after another, not
        chunk by chunk in turn, so the first is not delayed by the others.
        """
        due = self._due(self._ready())
        self.has_due = bool(due)
        if not due:
            return None
        first = due[0]
        if not self._reads_oldest:
            first = min(due, key=lambda prefill: prefill.num_remaining_tokens)
        prompts = [first]
        if not first.is_retried:
            others = (prefill for prefill in due if prefill is not first and not prefill.is_retried)
            prompts += [prefill for prefill in others if prefill.batch_key == first.batch_key]
        is_brief = self._turns is not None and self._turns.expects_other(first.tenant, now)
        shape = pacing.choose_shape(prompts, now, decoding, is_brief=is_brief)
        if shape is None:
            return None
        self.in_flight = tuple(prompts[: shape.num_rows])
        rows = tuple(self._row(prefill, shape.num_tokens) for prefill in self.in_flight)
        return PrefillBatch(rows, shape, first.pool)

    def alternate(self) -> None:
        """Let the next step begin with the oldest prompt if this one began with the shortest, or reversed."""
        self._reads_oldest = not self._reads_oldest

    def restart(self, prefill: Prefill) -> None:
        """Read a prompt once more, from its start."""
        request = prefill.requests[0]
        # Charge again for what was restored: it may be read this time.
        self._waiting.charge(request.add, num_input=request.num_cached_tokens)
        prefill.restart()

    def _due(self, ready: list[Prefill]) -> list[Prefill]:
        """Return the prompts that wait for no other tenant's prompt or answer."""
        if self._turns is None:
            return ready
        decoding = (request.add for pool in self._pools for request in pool.decoding.values())
        adds = itertools.chain(decoding, (prefill.requests[0].add for prefill in ready))
        tenants = {add.tenant for add in adds if not add.is_background}
        return [prefill for prefill in ready if not self._turns.yields(prefill.tenant, tenants)]

    def _ready(self) -> list[Prefill]:
        """Return the prompts that can be read on now, in the order of admission."""
        if len(self._models) == 1:
            return self._models[0].prefixes.match(self.reading)
        ready: list[Prefill] = []
        for index, model in enumerate(self._models):
            ready += model.prefixes.match([prefill for prefill in self.reading if prefill.model == index])
        return [prefill for prefill in self.reading if prefill in ready]

    def _row(self, prefill: Prefill, max_tokens: int) -> PrefillRow:
        row = prefill.row(max_tokens)
        prefixes = self._models[prefill.model].prefixes
        if not prefill.has_begun:
            # Admission charged the whole prompt: refund the part that is restored.
            prefixes.begin(prefill)
            self._waiting.charge(prefill.requests[0].add, num_input=-prefill.num_computed_tokens)
        stored = prefixes.store(prefill, row.start + len(row.token_ids))
        return replace(row, stored_blocks=stored) if stored else row

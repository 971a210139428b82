"""Whether there is room for a waiting sequence: free slots and scratches, less what is left to others.

A background sequence leaves slots to the foreground, and the last of several scratches. In the fair order, so
does a tenant to other tenants that were here lately, as far as `_leaves_room` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from backends.clock import Clock
from scheduler.config import SchedulerConfig
from scheduler.fairness import DeviceTurns
from scheduler.messages import Add
from scheduler.model_state import ModelState
from scheduler.pool_state import PoolState
from scheduler.prefill import Prefill
from scheduler.request import Request
from scheduler.waiting import WaitingQueue

_MIN_SHARED_SLOTS = 4  # of a pool whose last slot is left to others: of fewer, one is too large a share


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A view of the scheduler's state. `turns` is None in the orders that know no tenants."""

    config: SchedulerConfig
    clock: Clock
    pools: Sequence[PoolState]
    models: Sequence[ModelState]
    reading: Sequence[Prefill]
    waiting: WaitingQueue
    turns: DeviceTurns | None

    def live(self) -> list[Request]:
        """Return the admitted sequences that have not ended."""
        decoding = (request for pool in self.pools for request in pool.decoding.values())
        return [*decoding, *(request for prefill in self.reading for request in prefill.requests)]

    def has_room(self, request: Request) -> bool:
        """Return whether a sequence may be admitted now."""
        has_slot = not request.add.needs_slot or self.num_free_slots(request.add) > 0
        return has_slot and (not request.needs_scratch or self._has_scratch(request.add))

    def num_free_slots(self, add: Add) -> int:
        """Return how many slots a request may take now."""
        pool = self.pools[add.pool]
        num_free, num_slots = pool.slots.num_free, pool.spec.num_slots
        if num_free == 0:
            return 0
        if not add.is_background and (num_slots < _MIN_SHARED_SLOTS or not self._leaves_room(add)):
            return num_free
        holders = [request.add for request in self.live() if request.slot is not None]
        holders = [holder for holder in holders if holder.pool == add.pool]
        if add.is_background:
            num_held = sum(holder.is_background for holder in holders)
            return min(num_free, self.config.num_background_slots(num_slots) - num_held)
        num_held = sum(holder.tenant == add.tenant for holder in holders)
        return min(num_free, num_slots - 1 - num_held)

    def _has_scratch(self, add: Add) -> bool:
        index = self.pools[add.pool].model
        scratches = self.models[index].scratches
        num_scratch = self.models[index].spec.scratch.num_scratch
        if scratches.num_free == 0 or num_scratch == 1:
            return scratches.num_free > 0
        if add.is_background:
            return scratches.num_free > 1
        own = [prefill for prefill in self.reading if prefill.model == index and prefill.tenant == add.tenant]
        num_held = sum(prefill.scratch is not None for prefill in own)
        return num_held < num_scratch - 1 or not self._leaves_room(add)

    def _leaves_room(self, add: Add) -> bool:
        """Return whether a tenant leaves the last slot, and the last of several scratches, to other tenants.

        It does while others were here lately, unless they wait and have had more tokens.
        """
        if self.turns is None or not self.turns.has_others(add.tenant, self.clock.now()):
            return False
        return self.waiting.leaves_turn(add)

"""Which pool decodes next, with which rows, how many steps its launch has, and which tokens it guesses.

Few live sequences leave a step's time to the weights, which it reads once for any number of rows. Rows that
verify a draft are then nearly free. Beside more sequences they are not, and nothing is guessed.
"""

from collections.abc import Sequence

from backends.interface import DecodeBatch
from scheduler.fairness import DeviceTurns
from scheduler.pacing import Pacing
from scheduler.pool_state import PoolState
from scheduler.request import Request
from scheduler.waiting import WaitingQueue

_MAX_DRAFTING = 2  # live sequences


class DecodeRotation:
    """Pools decode in rounds: once one pool has decoded, the others follow before it decodes again.

    Prefill waits for the end of the round. The time left in a gap is divided when a round starts, so no pool
    takes the time of another. `turns` is None in the orders that know no tenants.
    """

    def __init__(
        self, pools: Sequence[PoolState], max_steps: int, max_draft_tokens: int, turns: DeviceTurns | None
    ) -> None:
        self._pools = pools
        self._turns = turns
        self._max_steps = max_steps
        self._max_draft_tokens = max_draft_tokens
        self._due: list[PoolState] = []  # pools that have not decoded in this round
        self._steps_in_time: int | None = None  # that each pool may take in this round; None: any number

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and a pool has yet to decode in it."""
        return any(pool.decoding for pool in self._due)

    def decoding(self) -> list[int]:
        """Return the indices of the pools in which sequences decode."""
        return [pool.index for pool in self._pools if pool.decoding]

    def next_batch(
        self, waiting: WaitingQueue, pacing: Pacing, now: float, *, prompt_waits: bool
    ) -> DecodeBatch | None:
        """Return the next launch, or None when no sequence decodes.

        `prompt_waits` says that a prompt could be read now.
        """
        if not self.is_under_way:
            self._due = list(self._pools)
            self._steps_in_time = pacing.max_decode_steps(self.decoding(), now)
        self._due = [pool for pool in self._due if pool.decoding]
        if not self._due:
            return None
        pool = self._due.pop(0)
        # After a failed step, its sequences decode alone: the one at fault must not cost the others theirs.
        retried = next((request for request in pool.decoding.values() if request.is_retried), None)
        if retried is not None:
            return DecodeBatch((retried.decode_row(1),), 1, pool.index)
        requests = self._due_requests(pool, pacing, now, prompt_waits=prompt_waits)
        is_partial = len(requests) < len(pool.decoding)
        if is_partial:
            self._steps_in_time = 1  # of the pools that follow: the rows that skip wait for them too
        drafts = self._drafts(pool, requests)
        is_single = is_partial or any(drafts)
        num_steps = 1 if is_single else self._num_steps(pool, waiting.num_waiting(pool.index))
        rows = tuple(
            request.decode_row(num_steps, draft) for request, draft in zip(requests, drafts, strict=True)
        )
        return DecodeBatch(rows, num_steps, pool.index)

    def _due_requests(
        self, pool: PoolState, pacing: Pacing, now: float, *, prompt_waits: bool
    ) -> list[Request]:
        """Return the sequences that take the pool's next step: all, or those of the tenants whose turn it is.

        A slot loses nothing by a step that it does not take.
        """
        requests = list(pool.decoding.values())
        tenants = {request.add.tenant for request in requests if not request.add.is_background}
        if self._turns is None or len(tenants) < 2:
            return requests
        due = {tenant for tenant in tenants if not self._turns.yields(tenant, tenants)}
        if due == tenants:
            return requests
        if not pacing.may_skip(pool.index, self.decoding(), now, prompt_waits=prompt_waits):
            return requests
        return [
            request for request in requests if request.add.tenant in due and not request.add.is_background
        ]

    def _drafts(self, pool: PoolState, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Return a draft for each of these sequences, () for none. The device's limit is shared equally."""
        # Without the tokens that the rows read in any case.
        most = min(self._max_draft_tokens, pool.spec.max_draft_tokens) + 1 - len(requests)
        num_live = sum(len(other.decoding) for other in self._pools)
        if num_live > _MAX_DRAFTING or most < 1 or not all(each.draw().is_plain for each in requests):
            return [()] * len(requests)
        return [
            request.draft(
                most // len(requests),
                pool.spec.draft_room(request.num_prefill_tokens, request.num_computed_tokens),
            )
            for request in requests
        ]

    def _num_steps(self, pool: PoolState, num_waiting: int) -> int:
        """Return the steps of a launch: none beyond the shortest answer's length.

        While a sequence waits for the pool, no step follows one that may free a slot. Only forced tokens
        cannot end a sequence.
        """
        requests = pool.decoding.values()
        limits = [self._max_steps, *(request.max_decode_steps for request in requests)]
        if self._steps_in_time is not None:
            limits.append(self._steps_in_time)
        if num_waiting:
            limits += [request.num_forced_left for request in requests]
        return max(1, min(limits))

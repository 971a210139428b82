"""A scheduler for simulations, in which no token is read before its answer ends.

It decides as `Scheduler` does, and accounts for an answer's tokens once, at its end. So the time of a step
does not grow with the number of answers under way.
"""

import heapq

from backends.clock import Clock
from backends.interface import (
    BackendSpec,
    BatchResult,
    DecodeBatch,
    DecodeRow,
    Draw,
    SampledToken,
    SamplingParams,
)
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason
from scheduler.prefill import Prefill
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

_DRAW = Draw(SamplingParams(temperature=0.0))


class CountingScheduler(Scheduler):
    """For one pool whose requests have one choice each and end at their length: none stops or is aborted.

    A decode batch has one step, which the caller may replace by up to `num_steps_left`. Its rows have
    neither tokens nor draws of their own, and its result needs no tokens.
    """

    def __init__(self, spec: BackendSpec, config: SchedulerConfig, clock: Clock) -> None:
        assert len(spec.pools) == 1, spec.pools
        super().__init__(spec, config, clock)
        self._num_steps = 0  # of all decode batches so far
        # A heap of the answers under way: the number of steps at which they end, and the order of their first
        # tokens, which breaks ties as `Scheduler` does.
        self._ends: list[tuple[int, int, Request]] = []
        self._num_begun = 0
        self._offsets: dict[int, int] = {}  # by slot: the index of its next token, less `_num_steps`

    @property
    def num_steps_left(self) -> int:
        """How many decode steps follow until an answer ends."""
        return self._ends[0][0] - self._num_steps

    def _decode_batch(self) -> DecodeBatch | None:
        if not self._ends:
            return None
        num_steps, offsets = self._num_steps, self._offsets
        rows = [
            DecodeRow(
                request.add.request_id,
                slot,
                0,
                offsets[slot] + num_steps,
                request.num_prefill_tokens,
                _DRAW,
            )
            for slot, request in self._pools[0].decoding.items()
        ]
        return DecodeBatch(tuple(rows))

    def _finish_prefill(self, prefill: Prefill, sampled: tuple[SampledToken, ...], now: float) -> None:
        super()._finish_prefill(prefill, sampled, now)
        for request in prefill.requests:
            if request.status is RequestStatus.DECODE and request.slot is not None:
                num_left = request.add.stop.max_tokens - request.num_output_tokens
                heapq.heappush(self._ends, (self._num_steps + num_left, self._num_begun, request))
                self._num_begun += 1
                self._offsets[request.slot] = request.num_computed_tokens - self._num_steps

    def _update_decode(self, batch: DecodeBatch, _result: BatchResult, _now: float) -> None:
        self._num_steps += batch.num_steps
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, _, request = heapq.heappop(self._ends)
            num_tokens = request.add.stop.max_tokens - request.num_output_tokens
            request.num_computed_tokens += num_tokens
            request.output_token_ids += [0] * num_tokens
            self._waiting.charge(request.add, num_output=num_tokens)
            self._end(request, FinishReason.LENGTH)

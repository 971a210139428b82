"""The engine's loop, run in one thread: it takes messages in, runs device steps and puts outputs out.

It owns the scheduler and the backend. Other threads exchange only frozen messages with it. How outputs reach
the clients is unknown here.
"""

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from backends.clock import Clock
from backends.interface import Backend, BackendError, BackendUnusableError, Batch, CodeState
from scheduler.messages import (
    Abort,
    Add,
    EngineInput,
    EngineOutput,
    Finish,
    FinishReason,
    ResetPrefixes,
    ServedElsewhere,
    Shutdown,
    WatchSlots,
)
from scheduler.scheduler import Scheduler
from scheduler.stats import BatchRecord, StepRecord

logger = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[list[EngineOutput], StepRecord], None]


class EngineCore:
    """Call `run` in one thread. Other threads put messages into the inbox and read the public attributes.

    A watchdog may consider the engine stuck when it is not idle and `last_step_time`, by the engine's clock,
    is long ago.
    """

    def __init__(
        self, scheduler: Scheduler, backend: Backend, clock: Clock, inbox: "SimpleQueue[EngineInput]"
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._inbox = inbox
        self._is_shutting_down = False
        self.is_idle = True  # blocked until a message arrives
        self.last_step_time = clock.now()
        self.error: Exception | None = None  # that killed the engine

    @property
    def code(self) -> CodeState:
        """What decode steps run as."""
        return self._backend.code

    def run(self, deliver: Deliver) -> None:
        """Run steps until `Shutdown`, and deliver the outputs of each.

        Every sequence ends with exactly one final output. A dead engine still answers: every request that is
        added gets a final error.
        """
        try:
            while not self._is_shutting_down:
                record = self.step()
                deliver(self._scheduler.take_outputs(), record)
        except Exception as error:
            logger.exception("the engine died")
            self.error = error
            self._close(deliver, FinishReason.ERROR, f"the engine died: {error}")
        else:
            self._close(deliver, FinishReason.ABORT, "the server is shutting down")

    def step(self) -> StepRecord:
        """Run one turn of the loop. `Scheduler.take_outputs` returns its outputs."""
        self._drain_inbox()
        self._scheduler.expire()
        batch = self._scheduler.schedule()
        record = self._execute(batch) if batch is not None else None
        self.last_step_time = self._clock.now()
        has_failed = batch is not None and record is None
        return StepRecord(record, self._scheduler.stats(), has_failed)

    def _drain_inbox(self) -> None:
        """Handle the messages that have arrived. Blocks only when there is nothing else to do."""
        if not self._scheduler.has_work:
            self.is_idle = True
            while self._inbox.empty() and self._backend.use_idle_time():
                pass
            message = self._inbox.get()
            self.last_step_time = self._clock.now()
            self.is_idle = False
            self._handle(message)
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait())

    def _handle(self, message: EngineInput) -> None:
        match message:
            case Add():
                self._scheduler.add(message)
            case Finish():
                self._scheduler.finish(message)
            case Abort():
                self._scheduler.abort(message)
            case ServedElsewhere():
                self._scheduler.charge_elsewhere(message)
            case ResetPrefixes():
                self._scheduler.reset_prefixes()
            case WatchSlots():
                self._scheduler.watch_slots(message)
            case Shutdown():
                self._is_shutting_down = True

    def _execute(self, batch: Batch) -> BatchRecord | None:
        try:
            result = self._backend.submit(batch).result()
        except BackendUnusableError:
            raise
        except BackendError as error:
            num_ended = self._scheduler.fail(batch, error)
            if num_ended:
                logger.warning("a step failed for good, and %d sequences end: %s", num_ended, error)
            else:
                logger.warning("a step failed, and each of its rows tries it again alone: %s", error)
            return None
        self._scheduler.update(batch, result)
        return BatchRecord.of(batch, result)

    def _close(self, deliver: Deliver, reason: FinishReason, message: str) -> None:
        """Give every open sequence its final output, and refuse all requests until `Shutdown`."""
        self._scheduler.fail_all(reason, message)
        self._deliver_outputs(deliver)
        self.is_idle = True
        while not (self._is_shutting_down and self._inbox.empty()):
            # The others are dropped. `Finish` and `Abort` name sequences that `fail_all` or `refuse` has
            # ended, and a second final output would break the promise of exactly one.
            match self._inbox.get():
                case Add() as add:
                    self._scheduler.refuse(add, reason, message)
                    self._deliver_outputs(deliver)
                case Shutdown():
                    self._is_shutting_down = True

    def _deliver_outputs(self, deliver: Deliver) -> None:
        deliver(self._scheduler.take_outputs(), StepRecord(None, self._scheduler.stats()))

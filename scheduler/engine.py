"""The loop that turns messages into steps and steps into messages, in a thread of its own.

Owns the scheduler and the backend; what crosses to other threads is frozen. It knows nothing of who delivers the outputs or how.
"""

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from backends.clock import Clock
from backends.interface import Backend, BackendError, BackendUnusableError, Batch
from scheduler.messages import Abort, Add, EngineInput, EngineOutput, Finish, FinishReason, Shutdown
from scheduler.scheduler import Scheduler
from scheduler.stats import BatchRecord, StepRecord

logger = logging.getLogger(__name__)

Deliver: TypeAlias = Callable[[list[EngineOutput], StepRecord], None]


class EngineCore:
    """`run` in one thread; from others, put messages in the inbox and read the public attributes.

    A watchdog may take the engine for stuck when it is not idle and `last_step_time`, by the engine's clock, lies far back.
    """

    def __init__(
        self, scheduler: Scheduler, backend: Backend, clock: Clock, inbox: "SimpleQueue[EngineInput]"
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._clock = clock
        self._inbox = inbox
        self._is_shutting_down = False
        self.is_idle = True  # blocked until a message comes
        self.last_step_time = clock.now()
        self.error: Exception | None = None  # what the engine died of

    def run(self, deliver: Deliver) -> None:
        """Work until `Shutdown`. Each turn's outputs are delivered at once, and every sequence ends with one final output.

        A dead engine stays to answer: whatever is added gets a final error.
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
        """Take one turn. What it brought waits in `Scheduler.take_outputs`."""
        self._drain_inbox()
        self._scheduler.expire()
        batch = self._scheduler.schedule()
        record = self._execute(batch) if batch is not None else None
        self.last_step_time = self._clock.now()
        return StepRecord(record, self._scheduler.stats())

    def _drain_inbox(self) -> None:
        """Take in what has arrived. Blocks only when there is nothing else to do."""
        if not self._scheduler.has_work:
            self.is_idle = True
            message = self._inbox.get()
            self.last_step_time = self._clock.now()
            self.is_idle = False
            self._take_in(message)
        while not self._inbox.empty():
            self._take_in(self._inbox.get_nowait())

    def _take_in(self, message: EngineInput) -> None:
        match message:
            case Add():
                self._scheduler.add(message)
            case Finish():
                self._scheduler.finish(message)
            case Abort():
                self._scheduler.abort(message)
            case Shutdown():
                self._is_shutting_down = True

    def _execute(self, batch: Batch) -> BatchRecord | None:
        try:
            result = self._backend.submit(batch).result()
        except BackendUnusableError:
            raise
        except BackendError as error:
            logger.warning("a step failed, its requests end: %s", error)
            self._scheduler.fail(batch, error)
            return None
        self._scheduler.update(batch, result)
        return BatchRecord.of(batch, result)

    def _close(self, deliver: Deliver, reason: FinishReason, message: str) -> None:
        """Give every open sequence its final output, and answer whatever is still added until `Shutdown` has come."""
        self._scheduler.fail_all(reason, message)
        self._deliver_news(deliver)
        self.is_idle = True
        while not (self._is_shutting_down and self._inbox.empty()):
            match self._inbox.get():
                case Add() as add:
                    self._scheduler.refuse(add, reason, message)
                    self._deliver_news(deliver)
                case Shutdown():
                    self._is_shutting_down = True

    def _deliver_news(self, deliver: Deliver) -> None:
        deliver(self._scheduler.take_outputs(), StepRecord(None, self._scheduler.stats()))

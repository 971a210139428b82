"""Worker threads for texts of different sizes, in which the owners of work take turns.

Work waits only for work of its own size: a short text never waits for a long one. Within a lane, each owner
has at most one piece of work at a time, and owners take turns. With two workers, the work of one owner never
waits for that of another one; with more owners, for one piece of each that came before.
"""

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_State = TypeVar("_State")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Job(Generic[_State]):
    work: Callable[[_State], Any]
    future: Future[Any]


class Lane(Generic[_State]):
    """Threads with states of their own. `make_state` makes each at its first use, by the worker's number.

    The threads' priority is lower than the process's by `niceness`, on Linux. `close` the lane at the end.
    """

    def __init__(
        self, name: str, make_state: Callable[[int], _State], num_workers: int = 1, niceness: int = 0
    ) -> None:
        self._name = name
        self._make_state = make_state
        self._num_workers = num_workers
        self._niceness = niceness
        self._waiting: OrderedDict[str, deque[_Job[_State]]] = OrderedDict()  # by owner, the next one first
        self._running: set[str] = set()  # owners
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return not self._running and not self._waiting

    def submit(self, owner: str, work: Callable[[_State], _Result]) -> "Future[_Result]":
        """Run `work` with the lane's state in its turn. A cancelled future that has not begun is skipped."""
        future: Future[_Result] = Future()
        with self._changed:
            assert not self._is_closed, "used after its end"
            # Without those whose client has left: each holds its text.
            jobs = deque(job for job in self._waiting.get(owner, ()) if not job.future.cancelled())
            jobs.append(_Job(work, future))
            self._waiting[owner] = jobs
            self._start_worker()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """End the thread after the work that runs."""
        with self._changed:
            self._is_closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_worker(self) -> None:
        """Start another worker if there are more owners than workers."""
        number = len(self._threads)
        if number < min(self._num_workers, len(self._running | self._waiting.keys())):
            worker = threading.Thread(
                target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True
            )
            self._threads.append(worker)
            worker.start()

    def _run(self, number: int) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere it would be the whole process's
            os.nice(self._niceness)
        state: _State | None = None
        while (next_job := self._next()) is not None:
            owner, job = next_job
            if not job.future.set_running_or_notify_cancel():
                self._end_job(owner)
                continue
            try:
                state = self._make_state(number) if state is None else state
                result = job.work(state)
            except BaseException as error:
                self._end_job(owner)
                job.future.set_exception(error)
            else:
                self._end_job(owner)
                job.future.set_result(result)

    def _end_job(self, owner: str) -> None:
        """Be idle before a result is known, since its receiver may ask at once."""
        with self._changed:
            self._running.discard(owner)
            self._changed.notify_all()

    def _next(self) -> tuple[str, _Job[_State]] | None:
        """Return the next owner and its oldest job; None at the end."""
        with self._changed:
            while (owner := self._next_owner()) is None:
                if self._is_closed:
                    return None
                self._changed.wait()
            jobs = self._waiting.pop(owner)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind all others
            self._running.add(owner)
            return owner, job

    def _next_owner(self) -> str | None:
        return next((owner for owner in self._waiting if owner not in self._running), None)

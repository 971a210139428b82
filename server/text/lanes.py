"""Worker threads for texts of different sizes, in which the owners of work take turns.

Work waits only for work of its own size: a short text never waits for a long one. Within a lane, owners are
served in turns, so that the work of one delays another's by one piece.
"""

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
    """One thread with a state of its own, made at the first use by `make_state`. `close` it at the end."""

    def __init__(self, name: str, make_state: Callable[[], _State]) -> None:
        self._make_state = make_state
        self._waiting: OrderedDict[str, deque[_Job[_State]]] = OrderedDict()  # by owner, the next one first
        self._changed = threading.Condition()
        self._is_running = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return not self._is_running and not self._waiting

    def submit(self, owner: str, work: Callable[[_State], _Result]) -> "Future[_Result]":
        """Run `work` with the lane's state in its turn. A cancelled future that has not begun is skipped."""
        future: Future[_Result] = Future()
        with self._changed:
            assert not self._is_closed, "used after its end"
            if not self._thread.is_alive():
                self._thread.start()
            # Without those whose client has left: each holds its text.
            jobs = deque(job for job in self._waiting.get(owner, ()) if not job.future.cancelled())
            jobs.append(_Job(work, future))
            self._waiting[owner] = jobs
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread after the work that runs."""
        with self._changed:
            self._is_closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        state: _State | None = None
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    state = self._make_state() if state is None else state
                    result = job.work(state)
                except BaseException as error:
                    self._end_job()
                    job.future.set_exception(error)
                else:
                    self._end_job()
                    job.future.set_result(result)

    def _end_job(self) -> None:
        """Be idle before a result is known, since its receiver may ask at once."""
        with self._changed:
            self._is_running = False

    def _next(self) -> _Job[_State] | None:
        """Return the next owner's oldest job; None at the end."""
        with self._changed:
            self._is_running = False
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            owner, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind all others
            self._is_running = True
            return job

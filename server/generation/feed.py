"""The events of all the generations of one HTTP request, in the order in which they come, kept for a bounded time."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from server.engine.client import Ticket
from server.generation.output import Accepted, ChoiceDelta, Event, Generation


class SlowReaderError(Exception):
    """The client takes its answer more slowly than it is made, and has fallen too far behind."""

    def __init__(self, max_lag: float) -> None:
        super().__init__(f"the answer was read more than {max_lag:g} s after it was made")
        self.max_lag = max_lag


class EventFeed:
    """Several generations read at once; leaving it aborts what is unfinished.

    An event comes with the number of its generation. What a generation raises is raised by `next`. The ticket is given back when the last
    generation has ended, though it may take a slow client long after that to be told so. A choice's last delta comes with the one before
    it, if that still waits: clients look for the reason of an end where the text ends. What is not taken within `max_lag` seconds is
    thrown away: the generations are aborted, and `next` raises `SlowReaderError`.
    """

    def __init__(self, generations: Sequence[Generation], ticket: Ticket, max_lag: float) -> None:
        self._generations = generations
        self._ticket = ticket
        self._max_lag = max_lag
        self._num_reading = len(generations)
        self._queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()
        self._times: deque[float] = deque()  # when what is in the queue came
        self._early: deque[tuple[int, Event]] = deque()
        self._ahead: deque[tuple[int, Event] | Exception | None] = deque()  # taken from the queue to look at
        self._num_open = len(generations)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._read(number, generation))
            for number, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accepted(self) -> None:
        """Wait until the engine has taken every generation. Raises `GenerationError` if one of them has failed by then."""
        num_missing = len(self._generations)
        while num_missing or self._has_more:
            item = await self._get()
            if item is not None and isinstance(item[1], Accepted):
                num_missing -= 1
            elif item is not None:
                self._early.append(item)

    async def next(self, deadline: float | None = None) -> tuple[int, Event] | None:
        """Return the next event, or None at the end. Raises TimeoutError when the loop's time reaches `deadline`."""
        if self._early:
            return self._early.popleft()
        if not self._has_more:
            async with asyncio.timeout_at(deadline):
                return await self._get()
        return await self._get()

    async def _get(self) -> tuple[int, Event] | None:
        while self._num_open or self._has_more:
            item = self._ahead.popleft() if self._ahead else await self._taken()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return await self._joined(*item)
            self._num_open -= 1
        return None

    async def _joined(self, number: int, event: Event) -> tuple[int, Event]:
        """Return an event with the one that ends its choice, if that is the next."""
        if not isinstance(event, ChoiceDelta) or event.final is not None or self._queue.empty():
            return number, event
        following = await self._taken()
        if isinstance(following, tuple):
            source, last = following
            if (
                isinstance(last, ChoiceDelta)
                and last.final is not None
                and (source, last.choice) == (number, event.choice)
            ):
                return number, event.followed_by(last)
        self._ahead.append(following)
        return number, event

    @property
    def _has_more(self) -> bool:
        return bool(self._ahead) or not self._queue.empty()

    async def _taken(self) -> tuple[int, Event] | Exception | None:
        item = await self._queue.get()
        self._times.popleft()
        return item

    async def _read(self, number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation):
                async for event in generation:
                    self._check_lag()
                    self._put((number, event))
            self._put(None)
        except Exception as error:
            self._put(error)
        finally:
            self._num_reading -= 1
            if self._num_reading == 0:
                self._ticket.release()

    def _put(self, item: tuple[int, Event] | Exception | None) -> None:
        self._times.append(asyncio.get_running_loop().time())
        self._queue.put_nowait(item)

    def _check_lag(self) -> None:
        """Throw everything away if the oldest event has waited for too long. Raises `SlowReaderError`."""
        if self._times and asyncio.get_running_loop().time() - self._times[0] > self._max_lag:
            self._times.clear()
            while not self._queue.empty():
                self._queue.get_nowait()
            raise SlowReaderError(self._max_lag)

"""The one queue between the engine and a client: the events of all prompts of one HTTP request.

The engine's outputs are decoded as they arrive, on the event loop and not when the client reads. A stop
string therefore ends its choice at once, however slowly the client takes its answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from scheduler.messages import AdmittedAdd, EngineOutput
from server.engine.client import EngineClient, Ticket
from server.generation.decoder import Decoder
from server.generation.events import Accepted, ChoiceDelta, Event, SlowReaderError


@dataclass(frozen=True, slots=True)
class _Entry:
    prompt: int
    event: Event
    time: float  # when it arrived, by the event loop's clock


class EventQueue:
    """A context manager that submits requests, at most `max_in_flight` at a time, and abandons them at exit.

    An event comes with the index of its prompt. The ticket is released when the last request has ended, even
    if a slow client reads that much later. Events that are not read within `max_lag` seconds are dropped: the
    requests are abandoned, and `next` raises `SlowReaderError`.
    """

    def __init__(
        self,
        client: EngineClient,
        adds: Sequence[AdmittedAdd],
        make_decoder: Callable[[AdmittedAdd], Decoder],
        ticket: Ticket,
        max_lag: float,
        max_in_flight: int | None = None,
    ) -> None:
        self._client = client
        self._adds = adds
        self._decoders = [make_decoder(add) for add in adds]
        self._ticket = ticket
        self._max_lag = max_lag
        self._num_at_first = min(len(adds), max_in_flight or len(adds))
        self._num_submitted = 0
        self._num_unaccepted = self._num_at_first
        self._num_open_choices = {index: add.num_choices for index, add in enumerate(adds)}
        self._entries: deque[_Entry] = deque()
        self._error: Exception | None = None
        self._has_changed = asyncio.Event()

    def __enter__(self) -> Self:
        while self._num_submitted < self._num_at_first and self._error is None:
            self._submit_next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    async def accepted(self) -> None:
        """Wait until the engine has accepted the requests. Raises the error of one that has failed."""
        while self._num_unaccepted > 0 and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error

    async def next(self, deadline: float | None = None) -> tuple[int, Event] | None:
        """Return the next event, or None at the end.

        Raises the error of a failed request after the events before it, and TimeoutError when the event
        loop's clock reaches `deadline`.
        """
        while not self._entries:
            if self._error is not None:
                raise self._error
            if not self._num_open_choices:
                return None
            async with asyncio.timeout_at(deadline):
                await self._change()
        entry = self._entries.popleft()
        return entry.prompt, entry.event

    async def _change(self) -> None:
        self._has_changed.clear()
        await self._has_changed.wait()

    def _submit_next(self) -> None:
        index = self._num_submitted
        self._num_submitted += 1
        self._client.submit(self._adds[index], partial(self._receive, index))

    def _receive(self, prompt: int, output: EngineOutput) -> None:
        """Decode an output of the engine. Called by the engine's client, which must not see an error."""
        try:
            self._check_lag()
            for event in self._decoders[prompt].decode(output):
                self._put(prompt, event)
        except Exception as error:
            self._fail(error)
        else:
            if output.final is not None:
                self._end_choice(prompt)
        self._has_changed.set()

    def _put(self, prompt: int, event: Event) -> None:
        if isinstance(event, Accepted):
            self._num_unaccepted -= 1
            return
        last = self._entries[-1] if self._entries else None
        # Clients look for the finish reason where the text ends: the last delta joins the one before it.
        if (
            last is not None
            and last.prompt == prompt
            and isinstance(event, ChoiceDelta)
            and event.final is not None
            and isinstance(last.event, ChoiceDelta)
            and last.event.choice == event.choice
        ):
            self._entries[-1] = _Entry(prompt, last.event.followed_by(event), last.time)
        else:
            self._entries.append(_Entry(prompt, event, asyncio.get_running_loop().time()))

    def _end_choice(self, prompt: int) -> None:
        self._num_open_choices[prompt] -= 1
        if self._num_open_choices[prompt]:
            return
        del self._num_open_choices[prompt]
        if self._num_submitted < len(self._adds):
            self._submit_next()
        if not self._num_open_choices:
            self._ticket.release()

    def _check_lag(self) -> None:
        if self._entries and asyncio.get_running_loop().time() - self._entries[0].time > self._max_lag:
            self._entries.clear()
            raise SlowReaderError(self._max_lag)

    def _fail(self, error: Exception) -> None:
        """Keep the first error for the reader, and end everything: no partial answer is of use."""
        if self._error is None:
            self._error = error
        self._abandon()
        self._ticket.release()

    def _abandon(self) -> None:
        for prompt in self._num_open_choices:
            if prompt < self._num_submitted:
                self._client.abandon(self._adds[prompt].request_id)

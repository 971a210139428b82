"""The events of a request whose prompt a draft shortens: those of the draft, then those of the answer."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from scheduler.messages import AdmittedAdd, EngineOutput, FinishReason
from server.engine.client import EngineClient
from server.generation.event_queue import EventQueue
from server.generation.events import Drafted, DraftProgress, Event
from server.generation.speculative_prefill import Drafting, Outcome

logger: Final = logging.getLogger(__name__)


class DraftedQueue:
    """A context manager as `EventQueue`, with the same methods for one prompt.

    `make_queue` returns the queue of the request that follows the draft: the shortened one, or the whole one
    where the draft fails. Leaving the block abandons whichever is under way.
    """

    def __init__(
        self,
        client: EngineClient,
        drafting: Drafting,
        make_queue: Callable[[AdmittedAdd], EventQueue],
    ) -> None:
        self._client = client
        self._drafting = drafting
        self._make_queue = make_queue
        self._queue: EventQueue | None = None
        self._error: Exception | None = None
        self._drafted: Drafted | None = None
        self._num_read = 0  # tokens, by the draft
        self._num_shown = 0  # of these, those that were reported
        self._is_accepted = False
        self._turn: int | None = None
        self._has_changed = asyncio.Event()

    def __enter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._client.abandon(self._drafting.draft_add.request_id)
        if self._queue is not None:
            self._queue.__exit__(kind, error, trace)

    async def accepted(self) -> None:
        """Wait until the engine has accepted the draft's request, or the one that follows without it."""
        while not self._is_accepted and self._queue is None:
            await self._change()
        if not self._is_accepted and self._queue is not None:
            await self._queue.accepted()

    async def next(self, deadline: float | None = None) -> tuple[int, Event] | None:
        """Return the next event, or None at the end. Raises as `EventQueue.next` does."""
        while self._queue is None:
            if self._num_read > self._num_shown:
                self._num_shown = self._num_read
                return 0, DraftProgress(self._num_read, len(self._drafting.draft_add.prompt_token_ids))
            async with asyncio.timeout_at(deadline):
                await self._change()
        if self._drafted is not None:
            drafted, self._drafted = self._drafted, None
            return 0, drafted
        return await self._queue.next(deadline)

    async def _change(self) -> None:
        if self._error is None:
            self._has_changed.clear()
            await self._has_changed.wait()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        try:
            add, outcome = await self._shortened()
            self._start(add, outcome)
        except Exception as error:  # the reader must not wait for ever
            self._error = error
        self._has_changed.set()

    def _start(self, add: AdmittedAdd, outcome: Outcome) -> None:
        drafting = self._drafting
        pool = drafting.services.client.spec.pools[add.pool].name
        self._drafted = Drafted(outcome.value, add.prompt_token_ids, self._num_read, pool)
        num_removed = len(drafting.whole.prompt_token_ids) - len(add.prompt_token_ids)
        drafting.services.metrics.drafted(outcome.value, num_removed)
        queue = self._make_queue(AdmittedAdd(replace(add, turn=self._turn)))
        queue.__enter__()
        self._queue = queue

    async def _shortened(self) -> tuple[AdmittedAdd, Outcome]:
        """Return the request that follows the draft: the whole one if shortening it fails."""
        drafting = self._drafting
        try:
            scores = drafting.remembered or await self._score()
            if scores is not None:
                drafting.draft.remember(drafting.key, scores)
                add = await drafting.shortened(scores)
                return (drafting.whole, Outcome.UNCHANGED) if add is None else (add, Outcome.SHORTENED)
        except Exception:
            logger.warning(
                "request %s is read whole: shortening it failed", drafting.whole.request_id, exc_info=True
            )
        return drafting.whole, Outcome.FAILED

    async def _score(self) -> tuple[float, ...] | None:
        """Let the draft read the prompt; return its scores, or None if it failed."""
        finished: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()

        def receive(output: EngineOutput) -> None:
            self._num_read = max(self._num_read, output.num_computed_prompt_tokens)
            if output.final is None:
                self._is_accepted = True
            elif not finished.done():
                finished.set_result(output)
            self._has_changed.set()

        self._client.submit(self._drafting.draft_add, receive)
        output = await finished
        final = output.final
        assert final is not None, "the last output is final"
        self._turn = final.turn
        if final.reason is not FinishReason.LENGTH:
            logger.warning(
                "request %s is read whole: its draft ended with %s (%s)",
                self._drafting.whole.request_id,
                final.reason.value,
                final.message,
            )
            return None
        return output.importance

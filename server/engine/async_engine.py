"""An engine in a thread of its own, behind the event loop's `EngineClient`.

The thread loads the model, then runs `EngineCore`; it gets messages through its inbox and gives each turn's outputs to the loop in one
call. All else here happens on the loop: places, streams, and what is told to whoever observes. Every choice of every request ends with
exactly one final output, whatever happens to the thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, TypeVarTuple

from backends.clock import Clock
from backends.interface import Backend, BackendSpec
from scheduler.config import SchedulerConfig
from scheduler.constraints import Constraints
from scheduler.engine import EngineCore
from scheduler.messages import (
    Abort,
    Add,
    AdmittedAdd,
    EngineInput,
    EngineOutput,
    Final,
    Finish,
    FinishReason,
    Shutdown,
    Timing,
)
from scheduler.scheduler import Scheduler
from scheduler.stats import SlotUse, StepRecord
from server.engine.client import Health, HealthStatus, QueueFullError, UnavailableError
from server.engine.stream import Receiver, Stream
from server.engine.tickets import SequenceLimit, SequenceTicket

logger = logging.getLogger(__name__)

CLOSING_TIME = 5.0  # seconds that the engine's thread gets for its last step

_Args = TypeVarTuple("_Args")


class EngineObserver(Protocol):
    """Is told what happens, on the event loop."""

    def loaded(self, spec: BackendSpec) -> None:
        """The engine is ready."""
        ...

    def refused(self) -> None:
        """A request found no place."""
        ...

    def stepped(self, record: StepRecord) -> None:
        """The engine took one turn."""
        ...

    def read_prompt(self, add: Add) -> None:
        """A request's prompt has been read to its end."""
        ...

    def got_tokens(self, add: Add, /, since_arrival: float, since_last: float | None) -> None:
        """Tokens of a choice came: so many seconds after the request, and after the choice's last ones (None: its first)."""
        ...

    def generated(self, num_tokens: int) -> None:
        """So many more tokens count as output."""
        ...

    def finished(self, add: Add, choice: int, final: Final) -> None:
        """A choice ended. Once for every choice."""
        ...


class AsyncEngine:
    """`start` it in the running loop; then `drain` and `close`.

    `load` builds the backend, warmed up, in the engine's thread; `constraints` reads grammars there. The engine counts as stalled when
    there is work and no step has ended for `stall_limit` seconds.
    """

    def __init__(
        self,
        load: Callable[[], Backend],
        config: SchedulerConfig,
        observer: EngineObserver,
        clock: Clock,
        stall_limit: float,
        constraints: Constraints | None = None,
    ) -> None:
        self._load, self._config, self._observer, self._clock, self._stall_limit = (
            load,
            config,
            observer,
            clock,
            stall_limit,
        )
        self._constraints = constraints
        self._inbox: SimpleQueue[EngineInput] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="engine", daemon=True
        )  # a load under way must not keep the process alive
        self._streams: dict[str, Stream] = {}
        self._sequences: SequenceLimit | None = None
        self._background_sequences: SequenceLimit | None = None
        self._is_draining = False
        self._core: EngineCore | None = None
        self._spec: BackendSpec | None = None
        self._slots: tuple[SlotUse, ...] = ()
        self._failure: str | None = None  # why the engine's thread is of no use any more
        self._has_loaded = asyncio.Event()

    def start(self) -> None:
        """Begin to load."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_loaded(self) -> Health:
        """Return the engine's state once loading has ended: READY, or DEAD and why."""
        await self._has_loaded.wait()
        return self.health()

    async def drain(self, limit: float) -> None:
        """Admit nothing more, wait up to `limit` seconds until every place is given back, and abort what goes on then."""
        self._is_draining = True
        if self._sequences is None or self._background_sequences is None:
            return
        try:
            async with asyncio.timeout(limit):
                await self._sequences.all_released.wait()
                await self._background_sequences.all_released.wait()
        except TimeoutError:
            logger.warning("aborting %d requests that did not end within %g s", len(self._streams), limit)
            for request_id in self._streams:
                self.abort(request_id)

    async def close(self) -> None:
        """End the engine's thread, and with it whatever is still open.

        Not waited for are a model that is still being loaded, and a step that does not end within `CLOSING_TIME`.
        """
        self._is_draining = True
        self._inbox.put(Shutdown())
        if self._has_loaded.is_set():
            await asyncio.to_thread(self._thread.join, CLOSING_TIME)
            if self._thread.is_alive():
                logger.warning("the engine's step has not ended within %g s and is left behind", CLOSING_TIME)
            await asyncio.sleep(0)  # the thread's last words are on the loop by now: let them be heard

    # EngineClient

    @property
    def spec(self) -> BackendSpec:
        if self._spec is None:
            raise UnavailableError(self.health())
        return self._spec

    def reserve(self, num_sequences: int, tenant: str = "", *, in_background: bool = False) -> SequenceTicket:
        health = self.health()
        if health.status not in (HealthStatus.READY, HealthStatus.STALLED):
            raise UnavailableError(health)
        limit = self._background_sequences if in_background else self._sequences
        assert limit is not None
        try:
            return limit.acquire(num_sequences, tenant)
        except QueueFullError:
            self._observer.refused()
            raise

    def submit(self, add: AdmittedAdd, receive: Receiver) -> None:
        assert add.request_id not in self._streams, f"request {add.request_id} is there already"
        stream = self._streams[add.request_id] = Stream(add, receive)
        if self._failure is None:
            self._inbox.put(add)
        else:
            self._fail(stream, self._failure)

    def abandon(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.receive = None
            self.abort(request_id)

    def finish(self, request_id: str, choice: int, num_tokens: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.answer_lengths[choice] = num_tokens
            self._inbox.put(Finish(request_id, choice, num_tokens))

    def abort(self, request_id: str) -> None:
        self._inbox.put(Abort(request_id))

    def health(self) -> Health:
        if self._failure is not None:
            return Health(HealthStatus.DEAD, self._failure)
        core = self._core
        if core is not None and core.error is not None:
            return Health(HealthStatus.DEAD, "the engine failed")
        if self._is_draining:
            return Health(HealthStatus.DRAINING, "the server is shutting down")
        if core is None:
            return Health(HealthStatus.LOADING, "the model is being loaded")
        silence = self.now() - core.last_step_time
        if not core.is_idle and silence > self._stall_limit:
            return Health(
                HealthStatus.STALLED,
                f"no step has ended for {silence:.0f} s, the limit is {self._stall_limit:g} s",
            )
        return Health(HealthStatus.READY)

    def slots(self) -> tuple[SlotUse, ...]:
        return self._slots

    @property
    def num_unfinished(self) -> int:
        """Sequences that the engine was given and has not ended, by the loop's own account: right even when the engine is stuck."""
        return sum(len(stream.open_choices) for stream in self._streams.values())

    def now(self) -> float:
        return self._clock.now()

    # The engine's thread

    def _run(self) -> None:
        why = "loading failed"
        try:
            backend = self._load()
            scheduler = Scheduler(backend.spec, self._config, self._clock, self._constraints)
            core = EngineCore(scheduler, backend, self._clock, self._inbox)
            self._post(self._take_over, core, backend.spec)
            why = "the engine has stopped"
            core.run(lambda outputs, record: self._post(self._deliver, outputs, record))
            backend.close()
        except Exception as error:
            logger.debug(
                "%s", why, exc_info=True
            )  # `EngineCore` logs its own; what loading meets is mostly a wrong option
            why = f"{why}: {error}"
        finally:
            self._post(self._end, why)

    def _post(self, callback: Callable[[*_Args], None], *args: *_Args) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            logger.debug("the event loop has ended before the engine")

    # What the thread posts

    def _take_over(self, core: EngineCore, spec: BackendSpec) -> None:
        self._core, self._spec = core, spec
        num_slots, num_pools = sum(pool.num_slots for pool in spec.pools), len(spec.pools)
        share = self._config.max_num_waiting_per_tenant
        limits = (
            num_slots + num_pools * self._config.max_num_waiting,
            None if share is None else num_slots + num_pools * share,
        )
        self._sequences, self._background_sequences = SequenceLimit(*limits), SequenceLimit(*limits)
        self._observer.loaded(spec)
        self._has_loaded.set()

    def _deliver(self, outputs: list[EngineOutput], record: StepRecord) -> None:
        now = self.now()
        for output in outputs:
            self._hand_over(self._streams[output.request_id], output, now)
        self._slots = record.stats.slots
        self._observer.stepped(record)

    def _end(self, why: str) -> None:
        """The thread has ended: what is open ends with it."""
        self._failure = why
        self._has_loaded.set()
        for stream in list(self._streams.values()):
            self._fail(stream, why)

    # Streams

    def _hand_over(self, stream: Stream, output: EngineOutput, now: float) -> None:
        """Count an output and pass it on.

        Tokens go before the final output that they came with: a stop string among them corrects it.
        """
        self._observe(stream, output, now)
        final = output.final
        if final is None or output.tokens or output.prompt_logprobs:
            self._pass_on(stream, output if final is None else replace(output, final=None))
        if final is not None:
            self._end_choice(stream, output, final)

    def _observe(self, stream: Stream, output: EngineOutput, now: float) -> None:
        add = stream.add
        if not stream.has_read_prompt and output.num_computed_prompt_tokens == len(add.prompt_token_ids):
            stream.has_read_prompt = True
            self._observer.read_prompt(add)
        if output.tokens:
            last = stream.last_token_times.get(output.choice)
            self._observer.got_tokens(add, now - add.arrival_time, None if last is None else now - last)
            stream.last_token_times[output.choice] = now

    def _pass_on(self, stream: Stream, output: EngineOutput) -> None:
        if stream.receive is not None:
            stream.receive(output)
            self._observer.generated(stream.count(output.choice, len(output.tokens)))

    def _end_choice(self, stream: Stream, output: EngineOutput, final: Final) -> None:
        choice = output.choice
        stream.open_choices.remove(choice)
        if not stream.open_choices:
            del self._streams[stream.add.request_id]
        final = stream.corrected(choice, final)
        self._observer.generated(stream.count(choice, final.num_output_tokens - stream.num_counted[choice]))
        self._observer.finished(stream.add, choice, final)
        if stream.receive is not None:
            stream.receive(replace(output, tokens=(), prompt_logprobs=(), final=final))

    def _fail(self, stream: Stream, why: str) -> None:
        now = self.now()
        for choice in sorted(stream.open_choices):
            timing = Timing(stream.add.arrival_time, None, None, now)
            final = Final(
                FinishReason.ERROR, timing, len(stream.add.prompt_token_ids), num_output_tokens=0, message=why
            )
            self._hand_over(stream, EngineOutput(stream.add.request_id, choice, final=final), now)

"""An engine in its own thread, behind the event loop's `EngineClient`.

The thread loads the model, then runs `EngineCore`. Messages reach it through its inbox. It posts the outputs
of each step to the loop in one call. All else happens on the loop: admission tickets, streams, calls of the
observer. Every choice of every request ends with exactly one final output, also when the thread fails.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, TypeVarTuple

from backends.clock import Clock
from backends.interface import Backend, BackendSpec, CodeState
from scheduler.config import SchedulerConfig
from scheduler.constraints import Constraints
from scheduler.engine import EngineCore
from scheduler.fairness import weighted
from scheduler.messages import (
    Abort,
    Add,
    AdmittedAdd,
    EngineInput,
    EngineOutput,
    Final,
    Finish,
    FinishReason,
    ResetPrefixes,
    ServedElsewhere,
    Shutdown,
    Timing,
    WatchSlots,
)
from scheduler.scheduler import Scheduler
from scheduler.stats import SchedulerStats, StepRecord
from server.engine.client import Health, HealthStatus, QueueFullError, UnavailableError
from server.engine.stream import Receiver, Stream
from server.engine.tickets import SequenceLimit, SequenceTicket

logger = logging.getLogger(__name__)

CLOSING_TIME = 5.0  # seconds that `close` waits for the thread's last step

_Args = TypeVarTuple("_Args")


class EngineObserver(Protocol):
    """Receives the engine's events, on the event loop."""

    def loaded(self, spec: BackendSpec) -> None:
        """The engine is ready."""
        ...

    def refused(self) -> None:
        """A request was refused because the queue is full."""
        ...

    def stepped(self, record: StepRecord) -> None:
        """The engine's loop completed one iteration."""
        ...

    def read_prompt(self, add: Add) -> None:
        """A request's prompt was read to its end."""
        ...

    def got_tokens(self, add: Add, /, since_arrival: float, since_last: float | None) -> None:
        """Tokens of a choice arrived.

        `since_arrival` are the seconds since the request's arrival, `since_last` those since the choice's
        previous tokens (None: these are its first).
        """
        ...

    def generated(self, num_tokens: int) -> None:
        """`num_tokens` more tokens count as output."""
        ...

    def finished(self, add: Add, choice: int, final: Final) -> None:
        """A choice ended. Called once for each choice."""
        ...


class AsyncEngine:
    """Call `start` in the running loop; at the end, `drain` and `close`.

    `load` builds and warms up the backend, in the engine's thread. `constraints` makes matchers there. The
    engine counts as stalled when there is work and no step has ended for `stall_limit` seconds.
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
        self._load = load
        self._config = config
        self._observer = observer
        self._clock = clock
        self._stall_limit = stall_limit
        self._constraints = constraints
        self._inbox: SimpleQueue[EngineInput] = SimpleQueue()
        # A daemon, because a load under way must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._streams: dict[str, Stream] = {}  # by request id
        self._sequences: SequenceLimit | None = None
        self._background_sequences: SequenceLimit | None = None
        self._is_draining = False
        self._core: EngineCore | None = None
        self._spec: BackendSpec | None = None
        self._stats: SchedulerStats | None = None  # after the last step
        # Weighted tokens by tenant, until `take_served`; None if it is never called.
        self._served: Counter[str] | None = None
        self._failure: str | None = None  # why the engine's thread has ended
        self._has_loaded = asyncio.Event()

    def start(self) -> None:
        """Start to load the model."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_loaded(self) -> Health:
        """Return the engine's state once loading has ended: READY, or DEAD with the reason."""
        await self._has_loaded.wait()
        return self.health()

    async def drain(self, limit: float) -> None:
        """Refuse new requests, wait up to `limit` seconds for the others, then abort those that remain."""
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
        """End the engine's thread and every open request.

        It does not wait for a load under way, nor longer than `CLOSING_TIME` for the thread's last step.
        """
        self._is_draining = True
        self._inbox.put(Shutdown())
        if self._has_loaded.is_set():
            await asyncio.to_thread(self._thread.join, CLOSING_TIME)
            if self._thread.is_alive():
                logger.warning(
                    "the engine's last step did not end within %g s; exiting without it", CLOSING_TIME
                )
            await asyncio.sleep(0)  # let the callbacks run that the thread posted last

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
        assert add.request_id not in self._streams, f"request {add.request_id} is already open"
        stream = Stream(add, receive)
        self._streams[add.request_id] = stream
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

    def take_served(self) -> Mapping[str, int]:
        """Return the weighted tokens that each tenant was served since the last call, without batches."""
        served, self._served = self._served, Counter()
        return served or {}

    def charge_elsewhere(self, num_weighted: Mapping[str, int]) -> None:
        """Let weighted tokens that other replicas have served count in the queue's order."""
        self._inbox.put(ServedElsewhere(num_weighted))

    def reset_prefixes(self) -> None:
        self._inbox.put(ResetPrefixes())

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

    def code(self) -> CodeState | None:
        """Return what decode steps run as; None before the model is loaded."""
        return None if self._core is None else self._core.code

    def stats(self) -> SchedulerStats | None:
        return self._stats

    def watch_slots(self, *, is_watched: bool) -> None:
        self._inbox.put(WatchSlots(is_watched))

    @property
    def num_unfinished(self) -> int:
        """Submitted sequences without a final output.

        The loop counts them, so the number is right for a stuck engine too.
        """
        return sum(len(stream.open_choices) for stream in self._streams.values())

    def now(self) -> float:
        return self._clock.now()

    # The engine's thread

    def _run(self) -> None:
        failure = "loading failed"
        try:
            backend = self._load()
            scheduler = Scheduler(
                backend.spec, self._config, self._clock, self._constraints, backend.prefix_archive
            )
            core = EngineCore(scheduler, backend, self._clock, self._inbox)
            self._post(self._accept_core, core, backend.spec)
            failure = "the engine has stopped"
            core.run(lambda outputs, record: self._post(self._deliver, outputs, record))
            backend.close()
        except Exception as error:
            # No traceback above debug level: `EngineCore` logs its errors itself, and an error of loading is
            # mostly a wrong option, which the process reports.
            logger.debug("%s", failure, exc_info=True)
            failure = f"{failure}: {error}"
        finally:
            self._post(self._end, failure)

    def _post(self, callback: Callable[[*_Args], None], *args: *_Args) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed, so no client is left
            logger.debug("the event loop ended before the engine")

    # Callbacks that the thread posts

    def _accept_core(self, core: EngineCore, spec: BackendSpec) -> None:
        self._core = core
        self._spec = spec
        num_slots = sum(pool.num_slots for pool in spec.pools)
        num_pools = len(spec.pools)
        limit = num_slots + num_pools * self._config.max_num_waiting
        limit_per_tenant = None
        if self._config.max_num_waiting_per_tenant is not None:
            limit_per_tenant = num_slots + num_pools * self._config.max_num_waiting_per_tenant
        self._sequences = SequenceLimit(limit, limit_per_tenant)
        self._background_sequences = SequenceLimit(limit, limit_per_tenant)
        self._observer.loaded(spec)
        self._has_loaded.set()

    def _deliver(self, outputs: list[EngineOutput], record: StepRecord) -> None:
        now = self.now()
        for output in outputs:
            self._hand_over(self._streams[output.request_id], output, now)
        self._stats = record.stats
        self._observer.stepped(record)

    def _end(self, failure: str) -> None:
        """End every open request, because the thread has ended."""
        self._failure = failure
        self._has_loaded.set()
        for stream in list(self._streams.values()):
            self._fail(stream, failure)

    # Streams

    def _hand_over(self, stream: Stream, output: EngineOutput, now: float) -> None:
        """Count an output and pass it to its receiver.

        Tokens and a final output of one step are passed separately, tokens first: the receiver may find a
        stop string in the tokens and correct the final output.
        """
        self._observe(stream, output, now)
        final = output.final
        if final is None or output.tokens or output.prompt_logprobs or output.kept:
            self._pass_on(stream, output if final is None else replace(output, final=None))
        if final is not None:
            self._end_choice(stream, output, final)

    def _observe(self, stream: Stream, output: EngineOutput, now: float) -> None:
        add = stream.add
        num_read = 0
        if not stream.has_read_prompt and output.num_computed_prompt_tokens == len(add.prompt_token_ids):
            stream.has_read_prompt = True
            num_read = len(add.prompt_token_ids)
            self._observer.read_prompt(add)
        if self._served is not None and not add.is_background:
            self._served[add.tenant] += weighted(num_read, len(output.tokens))
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
            stream.receive(replace(output, tokens=(), prompt_logprobs=(), kept=None, final=final))

    def _fail(self, stream: Stream, message: str) -> None:
        now = self.now()
        add = stream.add
        timing = Timing(add.arrival_time, admitted=None, first_token=None, finished=now)
        num_prompt_tokens = len(add.prompt_token_ids)
        final = Final(FinishReason.ERROR, timing, num_prompt_tokens, num_output_tokens=0, message=message)
        for choice in sorted(stream.open_choices):
            self._hand_over(stream, EngineOutput(add.request_id, choice, final=final), now)
